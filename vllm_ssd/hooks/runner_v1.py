"""Hooks into Model Runner V1. The runner makes a proposer by the name of its class, and does not
tell it which requests come and go. So two of the runner's methods are wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.patches import Original, Where, apply

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_ssd.worker.proposer import SSDProposer


def make_proposer(vllm_config: VllmConfig) -> SSDProposer:
    """Patch a worker's process and make its proposer; ``RuntimeError`` if vLLM is not supported."""
    from vllm.platforms import current_platform

    from vllm_ssd.worker.proposer import SSDProposer

    apply(Where.WORKER_V1)
    if current_platform.is_cpu():
        apply(Where.WORKER_ON_CPU)
    return SSDProposer(vllm_config)


def _proposer_of(runner: GPUModelRunner) -> SSDProposer | None:
    from vllm_ssd.worker.proposer import SSDProposer

    proposer = getattr(runner, "drafter", None)
    return proposer if isinstance(proposer, SSDProposer) else None


def with_updates(
    original: Original, self: GPUModelRunner, scheduler_output: SchedulerOutput
) -> Any:
    result = original(self, scheduler_output)
    proposer = _proposer_of(self)
    if proposer is not None:
        proposer.on_update(self, scheduler_output)
    return result


def with_drafts_taken(original: Original, self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    proposer = _proposer_of(self)
    if proposer is not None:
        proposer.on_proposed(self)
    return result
