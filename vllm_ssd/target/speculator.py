"""Model Runner V2's speculator, thin: what it proposes, ``lookups.py`` has looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_ssd.patching import patch
from vllm_ssd.target.distributions import DraftLogits
from vllm_ssd.target.lookups import WARM_UP, Lookups, make_lookups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.states import RequestState


class SSDSpeculator(BaseSpeculator):
    """One per worker. Only TP rank 0 talks to the draft; the others receive what it found."""

    supports_mm_inputs = False
    draft_logits: torch.Tensor | None = None  # drafts are tokens, each proposed with certainty

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState):
        config: Any = vllm_config.speculative_config
        self._tp_group = get_tp_group()
        rows = vllm_config.scheduler_config.max_num_seqs
        self._drafts = torch.zeros(rows, config.k, dtype=torch.int64, device=device)
        self._distributions: DraftLogits | None = None
        self._entries: torch.Tensor | None = None
        if config.top_m:
            vocab_size = vllm_config.model_config.get_vocab_size()
            self._distributions = DraftLogits(rows, config.k, config.top_m, vocab_size, device)
            self.draft_logits = self._distributions.logits
            self._entries = torch.zeros(
                rows, config.k, config.top_m, dtype=torch.int64, device=device
            )
        # Of requests that are about to be added: the runner's states are not told of it.
        self._temperatures: dict[str, float] = {}
        self._sampled = np.zeros(rows, np.bool_)  # by slot: its request is not greedy
        self._lookups: Lookups | None = None
        if self._tp_group.is_first_rank:
            self._lookups = make_lookups(vllm_config, device, req_states)
        self._follow(req_states)
        if config.top_m:
            _follow_runners()

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """The draft model is elsewhere: there is nothing to capture."""

    def capture(self) -> None:
        """Likewise."""

    def before_add(self, output: SchedulerOutput) -> None:
        """The scheduler's word on requests that will be added next."""
        for new in output.scheduled_new_reqs:
            if new.sampling_params is not None:
                self._temperatures[new.req_id] = new.sampling_params.temperature

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> torch.Tensor:
        """int64 [num_reqs, k], in batch order. V2 verifies k tokens of every request, so rows
        without drafts get a guess and others are filled up; the draft is told of its own only."""
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts.zero_()
        entries = None if self._entries is None else self._entries[: input_batch.num_reqs]
        if self._lookups is not None:
            self._lookups.look_up(input_batch, num_sampled, drafts, entries)
        self._tp_group.broadcast(drafts, src=0)  # nothing, in a group of one
        # Of greedy requests vLLM's sampler does not ask what their drafts were sampled from.
        sampled = self._sampled[input_batch.idx_mapping_np].any()
        if sampled and self._distributions is not None and entries is not None:
            self._tp_group.broadcast(entries, src=0)
            self._distributions.update(input_batch.idx_mapping, entries, temperature)
        return drafts

    def _follow(self, states: RequestState) -> None:
        """Hear of requests that come and go: V2 tells its request states and nobody else."""
        add_request: Callable[..., Any] = states.add_request
        remove_request: Callable[..., Any] = states.remove_request

        def add(req_id: str, *args: Any, all_token_ids: list[int], **kwargs: Any) -> Any:
            result = add_request(req_id, *args, all_token_ids=all_token_ids, **kwargs)
            temperature = self._temperatures.pop(req_id, 0.0)
            slot = states.req_id_to_index[req_id]
            self._sampled[slot] = temperature > 0
            if self._lookups is not None and not req_id.startswith(WARM_UP):
                self._lookups.add(req_id, slot, all_token_ids, temperature)
            return result

        def remove(req_id: str) -> Any:
            if self._lookups is not None:
                self._lookups.remove(req_id)
            return remove_request(req_id)

        states.add_request = add
        states.remove_request = remove


def _follow_runners() -> None:
    """Have every V2 model runner of this process tell its speculator of new requests first."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    patch(GPUModelRunner, "add_requests", _telling_of_requests)


def _telling_of_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_requests(self: GPUModelRunner, scheduler_output: SchedulerOutput) -> Any:
        if isinstance(self.speculator, SSDSpeculator):
            self.speculator.before_add(scheduler_output)
        return original(self, scheduler_output)

    return add_requests
