"""vLLM's own scheduler under Model Runner V2: what it schedules while the worker does without
drafts, before and after."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ssd.hooks.patches import SCHEDULING, apply_one
from vllm_ssd.service import rundir
from vllm_ssd.table import SpeculationTable, TableShape

K, TOKENS = 3, 40


@pytest.fixture
def engine(engine_args, models, tmp_path, monkeypatch):
    """(scheduler of two requests, the worker's table)"""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: tmp_path / "t")
    apply_one(SCHEDULING)
    options = {"method": "ssd", "k": K, "model": models.draft}
    config = engine_args(options, enable_prefix_caching=False).create_engine_config()
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)  # which needs a GPU
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = 64
    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    scheduler = AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )
    for name in ("a", "b"):
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        scheduler.add_request(Request(name, [1, 2, 3, 4], sampling, None))
    return scheduler, SpeculationTable.create(tmp_path / "t", TableShape(2, K, 2))


def run(scheduler, output):
    """The step's results: every other draft is accepted."""
    names = list(output.num_scheduled_tokens)
    drafts = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in names]
    sampled = [[7] * (1 + count // 2) for count in drafts]
    places = {name: place for place, name in enumerate(names)}
    scheduler.update_from_output(output, ModelRunnerOutput(names, places, sampled))
    return SimpleNamespace(
        drafts=drafts,
        tokens=[output.num_scheduled_tokens[name] for name in names],
        next_drafts=output.num_spec_tokens_to_schedule,
    )


def test_drafts_come_and_go_with_the_plan(engine):
    scheduler, table = engine
    requests = list(scheduler.requests.values())
    ahead = scheduler.schedule()  # vLLM schedules a step before the last one has ended
    steps = []
    for undrafted in (0, 0, 1, 1, 1, 1, 0, 0, 0, 0):
        table.plan["undrafted"] = undrafted
        following = scheduler.schedule()
        steps.append(run(scheduler, ahead))
        ahead = following
    assert steps[0].tokens == [4, 4] and steps[0].drafts == [0, 0], "the prompts"
    asked = [step.next_drafts for step in steps]
    assert asked == [K, K, K, 0, 0, 0, 0, K, K, K]
    assert [step.drafts[0] for step in steps] == [0, *asked[:-1]]
    for step in steps[1:]:
        assert step.tokens == [1 + count for count in step.drafts]
    while scheduler.has_unfinished_requests():
        following = scheduler.schedule()
        run(scheduler, ahead)
        ahead = following
    assert [request.num_output_tokens for request in requests] == [TOKENS, TOKENS]
