"""What vLLM's own scheduler under Model Runner V2 schedules while the worker does without drafts,
before and after."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ssd.hooks.patches import PATCHES, apply_one
from vllm_ssd.table import SpeculationTable, TableShape, rundir
from vllm_ssd.worker.draft_limit import DraftLimits

K, BLOCKS = 3, 512
TOKENS = 40


@pytest.fixture
def make(engine_args, models, tmp_path, monkeypatch):
    """Makes a scheduler of some requests, of as many tokens each, and the worker's table."""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: tmp_path / "t")
    (patch,) = (patch for patch in PATCHES if patch.wrapper == "scheduler.with_own_class")
    apply_one(patch)

    def make(requests, tokens=TOKENS, v2=True, **args):
        options = {"method": "ssd", "k": K, "model": models.draft}
        config = engine_args(options, enable_prefix_caching=False, **args).create_engine_config()
        config.scheduler_config.async_scheduling = v2
        config.speculative_config.run_dir = "of an engine that has files"
        config.cache_config.num_gpu_blocks = BLOCKS
        (tmp_path / "t").unlink(missing_ok=True)
        table = SpeculationTable.create(tmp_path / "t", TableShape(2, K, 2))
        layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(VllmConfig, "use_v2_model_runner", v2)  # which needs a GPU
            scheduler = (AsyncScheduler if v2 else Scheduler)(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], layer)]),
                structured_output_manager=StructuredOutputManager(config),
                block_size=16,
            )
        for number in range(requests):
            add(scheduler, f"r{number}", [1, 2, 3, 4], tokens)
        return scheduler, table

    return make


def add(scheduler, name, prompt, tokens=TOKENS):
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    scheduler.add_request(Request(name, prompt, sampling, None))


def run(scheduler, output, token=7):
    """A scheduled step's results: every other draft is accepted."""
    names = list(output.num_scheduled_tokens)
    drafts = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in names]
    sampled = [[token] * (1 + count // 2) for count in drafts]
    places = {name: place for place, name in enumerate(names)}
    found = scheduler.update_from_output(output, ModelRunnerOutput(names, places, sampled))
    return SimpleNamespace(
        drafts=drafts,
        tokens=[output.num_scheduled_tokens[name] for name in names],
        next_drafts=output.num_spec_tokens_to_schedule,
        outputs=found[0].outputs if 0 in found else [],
    )


def test_drafts_come_and_go_with_the_plan(make):
    scheduler, table = make(2)
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


@pytest.mark.parametrize("requests, most", [(13, 3), (16, 3), (17, 2), (20, 2), (33, 0)])
def test_all_requests_are_in_every_step(make, requests, most):
    """Also where k draft tokens of each do not fit, and whether there are drafts or not. So batches
    do not change their size with the limit, which then settles."""
    scheduler, table = make(
        requests, tokens=300, max_num_seqs=64, max_num_batched_tokens=16 * (K + 1)
    )
    limits, followed, drafts = DraftLimits(may_be_off=True), [], set()
    ahead = scheduler.schedule()
    for number in range(160):
        following = scheduler.schedule()
        step = run(scheduler, ahead)
        ahead = following
        if number < requests:
            continue  # all prompts are read
        assert len(step.tokens) == requests
        drafts.add(tuple({*step.drafts}))
        seconds = 0.03 if any(step.drafts) else 0.02
        followed.append(limits.limit(requests, False, seconds, requests))
        table.plan["undrafted"] = int(followed[-1] == 0)
    assert drafts == {(most,), (0,)}
    changes = sum(one != other for one, other in pairwise(followed))
    assert changes <= 4
    assert followed[-1] == 0 or not most, "which is faster here"


def add_loaded(scheduler, left):
    """A request whose KV was loaded, but for the tokens that are left."""
    loaded = Request("loaded", [1] * 8, SamplingParams(max_tokens=9), None)
    loaded.num_computed_tokens = 8 - left
    scheduler.add_request(loaded)


@pytest.mark.parametrize("requests, left", [(16, 4), (31, 1)])
def test_a_request_whose_kv_was_loaded_joins_a_full_batch(make, requests, left):
    """Such requests wait in a queue of their own, which vLLM looks at first. With one token left,
    it has to have room for k draft tokens besides."""
    scheduler, _ = make(requests, max_num_seqs=64, max_num_batched_tokens=16 * (K + 1))
    while len(scheduler.running) < requests:
        run(scheduler, scheduler.schedule())
    add_loaded(scheduler, left)
    run(scheduler, scheduler.schedule())
    assert "loaded" in scheduler.schedule().num_scheduled_tokens


def test_v1_fills_up_no_request(make):
    """Placeholders would take random numbers of its seed, and the sampler for CPUs reads them."""
    scheduler, _ = make(1, v2=False)
    run(scheduler, scheduler.schedule())
    add_loaded(scheduler, 1)
    joined = scheduler.schedule()
    assert joined.num_scheduled_tokens == {"r0": 1, "loaded": 1}
    assert joined.total_num_scheduled_tokens == 2 and not joined.scheduled_spec_decode_tokens


def test_a_prompt_of_one_token_that_joins_others(make):
    """vLLM fills it up with placeholders, which a state would take for tokens of the prompt."""
    scheduler, _ = make(1)
    run(scheduler, scheduler.schedule())
    add(scheduler, "one token", [1])
    joined = scheduler.schedule()
    assert joined.num_scheduled_tokens == {"r0": 1 + K, "one token": 1}
    assert joined.total_num_scheduled_tokens == 1 + K + 1
    run(scheduler, joined)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        assert {*output.num_scheduled_tokens.values()} == {1 + K}
        run(scheduler, output)


def test_what_is_cut_does_not_follow_from_tokens(make):
    """The scheduler cuts draft tokens before there are any: by the number of running requests, the
    step's token budget and the longest text."""
    found = []
    for token in (7, 9):
        scheduler, _ = make(5, tokens=60, max_num_batched_tokens=21, max_model_len=40)
        ahead, steps = scheduler.schedule(), []
        while scheduler.has_unfinished_requests():
            following = scheduler.schedule()
            drafts = ahead.scheduled_spec_decode_tokens
            assert {each for of_row in drafts.values() for each in of_row} <= {-1}
            steps.append(run(scheduler, ahead, token).drafts)
            ahead = following
        found.append(steps)
    assert found[0] == found[1]
    assert {count for step in found[0] for count in step} == {0, 1, 2, 3}
