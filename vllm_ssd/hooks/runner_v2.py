"""Hooks into Model Runner V2. The runner gets its speculator from a function, and tells only its
``RequestState`` which requests come and go. So ssd wraps that function and some methods of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original, Where, apply

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.states import RequestState

# The attribute of a runner's ``RequestState`` that holds the speculator to tell.
SPECULATOR = "_ssd_speculator"


def with_speculator(
    original: Original,
    vllm_config: VllmConfig,
    device: Any,
    req_states: RequestState,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not uses_ssd(vllm_config):
        return original(vllm_config, device, req_states, *args, **kwargs)
    from vllm_ssd.worker.speculator import SSDSpeculator

    apply(Where.WORKER_V2)
    speculator = SSDSpeculator(vllm_config, device, req_states)
    setattr(req_states, SPECULATOR, speculator)
    return speculator


def with_new_requests(
    original: Original, self: GPUModelRunner, scheduler_output: SchedulerOutput
) -> Any:
    """Pass the scheduler's output to the speculator before vLLM adds requests: only this output has
    their sampling settings."""
    speculator = getattr(self.req_states, SPECULATOR, None)
    if speculator is not None:
        speculator.before_add(scheduler_output)
    return original(self, scheduler_output)


def with_added_request(
    original: Original,
    self: RequestState,
    req_id: str,
    *args: Any,
    all_token_ids: list[int],
    **kwargs: Any,
) -> Any:
    result = original(self, req_id, *args, all_token_ids=all_token_ids, **kwargs)
    speculator = getattr(self, SPECULATOR, None)
    if speculator is not None:
        speculator.on_added(req_id, self.req_id_to_index[req_id], all_token_ids)
    return result


def with_removed_request(original: Original, self: RequestState, req_id: str) -> Any:
    speculator = getattr(self, SPECULATOR, None)
    if speculator is not None:
        speculator.on_removed(req_id)
    return original(self, req_id)
