"""Hooks into Model Runner V2. The runner gets its speculator from a function, and does not tell it
which requests come and go. So ssd wraps that function, and two methods that hear of requests. It
also corrects the order of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original

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

    speculator = SSDSpeculator(vllm_config, device, req_states)
    setattr(req_states, SPECULATOR, speculator)
    return speculator


def with_added_requests(
    original: Original, self: GPUModelRunner, scheduler_output: SchedulerOutput
) -> None:
    original(self, scheduler_output)
    speculator = getattr(self.req_states, SPECULATOR, None)
    if speculator is not None:
        for new in scheduler_output.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index[new.req_id]
            speculator.on_added(new.req_id, slot, new.prefill_token_ids, new.sampling_params)


def with_removed_request(original: Original, self: RequestState, req_id: str) -> Any:
    speculator = getattr(self, SPECULATOR, None)
    if speculator is not None:
        speculator.on_removed(req_id)
    return original(self, req_id)


def with_decodes_first(
    original: Original,
    num_tokens_per_req: Mapping[str, int],
    draft_tokens: Mapping[str, Sequence[int]],
    decode_query_len: int,
) -> list[str]:
    """Order the requests of a batch: those with draft tokens, then the others by their tokens.

    vLLM puts a prompt's part of just 1 + k tokens before the requests that decode without draft
    tokens. Layers with states take all that follows a prompt for prompts, and begin with the state
    before these requests' last accepted draft tokens. The text would be wrong."""
    ordered = original(num_tokens_per_req, draft_tokens, decode_query_len)
    return sorted(ordered, key=lambda r: 0 if draft_tokens.get(r) else num_tokens_per_req[r])
