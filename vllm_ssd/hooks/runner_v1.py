"""Hooks into Model Runner V1. The runner makes a proposer by the name of its class, and does not
tell it which requests come and go. So two of the runner's methods are wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.patches import Original

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_ssd.worker.proposer import SSDProposer


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
