"""vLLM's own scheduler as an engine under Model Runner V2 has it, and steps of it."""

from types import SimpleNamespace

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ssd.hooks.patches import PATCHES, apply_one

K = 3


def apply_named(wrapper):
    """Replace the function of vLLM that has this wrapper."""
    (patch,) = (patch for patch in PATCHES if patch.wrapper == wrapper)
    apply_one(patch)


def v2_scheduler(engine_args, monkeypatch, requests, blocks=64):
    """requests: by their ids, the number of tokens that each gets."""
    config = engine_args.create_engine_config()
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)  # which needs a GPU
    config.scheduler_config.async_scheduling = True
    config.speculative_config.run_dir = "of an engine that has files"
    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    scheduler = AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )
    for name, tokens in requests.items():
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        scheduler.add_request(Request(name, [1, 2, 3, 4], sampling, None))
    return scheduler


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
