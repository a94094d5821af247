"""Method ssd in the engines that vLLM's tests make, whatever speculation they ask for.

A plugin of vLLM's, so that it is in every process of theirs that makes an engine's config or runs
its scheduler.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A file to which every engine with ssd adds a line when it starts, when drafts are first verified
# and when one is first accepted.
SEEN = "SSD_UPSTREAM_SEEN"
# The number of engines to come that stay without speculation: what a test compares others with.
PLAIN = "SSD_UPSTREAM_PLAIN"
# What they all have for method: "ssd", or "ngram" or "none" to see whose fault it is.
METHOD = "SSD_UPSTREAM_METHOD"
# Tokens of a block of KV memory: the fewest on CPUs.
BLOCK = 32
# As in our own tests (``ENGINE`` of ``tests/support/harness.py``).
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# The folder of a target's draft, in the target's own.
DRAFT = "draft"


def register() -> None:
    """vLLM calls it in each of its processes."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler, "_seen_by_upstream"):
        Scheduler._seen_by_upstream = True
        EngineArgs.create_engine_config = _with_ssd(EngineArgs.create_engine_config)
        Scheduler.__init__ = _with_start_seen(Scheduler.__init__)
        Scheduler.update_from_output = _with_drafts_seen(Scheduler.update_from_output)


def _with_ssd(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import AttentionConfig

        if not Path(self.model, DRAFT).exists():  # it is a draft, in its own process
            return original(self, *args, **kwargs)
        self.speculative_config = _speculation(self.model, self.speculative_config or {})
        # What CPUs can do, and in a type in which texts can be compared.
        self.dtype, self.enforce_eager, self.async_scheduling = "float32", True, False
        self.attention_config = AttentionConfig()
        self.distributed_executor_backend = ONE_PROCESS
        if self.num_gpu_blocks_override and self.block_size != BLOCK:
            # Tests give as few of a GPU's blocks, of 16 tokens, as to be short of them.
            self.num_gpu_blocks_override = -(-self.num_gpu_blocks_override * 16 // BLOCK)
            self.block_size = BLOCK
        return original(self, *args, **kwargs)

    return create_engine_config


def _speculation(model: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    plain = int(os.environ.get(PLAIN, 0))
    if plain and not asked:
        os.environ[PLAIN] = str(plain - 1)
        return None
    k = asked.get("num_speculative_tokens", 3)
    if os.environ[METHOD] == "ssd":
        options = {"method": "ssd", "model": str(Path(model, DRAFT)), "k": k, "f": 2}
        # The draft is as slow as its target here: it would never be worth a wait.
        options |= {"on_miss": "wait", "max_wait_ms": 60_000}
        options |= {"max_model_len": asked.get("max_model_len")}
        return {name: value for name, value in options.items() if value is not None}
    if os.environ[METHOD] == "ngram":
        return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1}
    return None


def _with_start_seen(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_ssd.hooks.engine_args import uses_ssd

        self._with_ssd = uses_ssd(vllm_config)
        self._seen = set()
        _see(self, "engine")
        original(self, vllm_config, *args, **kwargs)

    return __init__


def _with_drafts_seen(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        rows = dict(zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids or ()))
        for request_id in scheduler_output.scheduled_spec_decode_tokens:
            _see(self, "verified")
            if len(rows.get(request_id, ())) > 1:
                _see(self, "accepted")
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def _see(scheduler: Any, what: str) -> None:
    if scheduler._with_ssd and what not in scheduler._seen:
        scheduler._seen.add(what)
        with open(os.environ[SEEN], "a") as seen:
            seen.write(f"{what}\n")
