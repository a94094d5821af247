"""Model Runner V2: a speculator, thin, and the two ways it has to look drafts up.

On GPUs a kernel does it and vLLM's scheduling stays ahead. Where the GPU cannot reach the table,
the host does it: each step then waits for the sampled counts to reach the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_ssd.log import get_logger
from vllm_ssd.patching import patch
from vllm_ssd.proposals import certain
from vllm_ssd.target.client import Row, SpeculationClient, connect
from vllm_ssd.target.distributions import DraftLogits
from vllm_ssd.target.guess import continuation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_ssd.target.device import DeviceClient

logger = get_logger(__name__)

# Requests that vLLM makes up to warm its kernels; the draft need not hear of them.
_WARM_UP = ("_warmup_", "_v2_mixed_warmup")


class Lookups(Protocol):
    """A client of the draft, as this runner uses it. Slots are vLLM's."""

    def add(self, request_id: str, slot: int, tokens: Sequence[int], temperature: float) -> None:
        """A request takes a slot; ``tokens`` is its text so far."""

    def remove(self, request_id: str) -> None:
        """The request left its slot."""

    def look_up(
        self,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        drafts: torch.Tensor,
        entries: torch.Tensor | None,
    ) -> None:
        """Write int64 [num_reqs, k] ``drafts``; rows without any get a guess, others are filled up.
        entries: int64 [num_reqs, k, top_m], written: what they were sampled from; None if they were
        not."""


class HostLookups:
    """Looks up with numpy. ``rows``: the largest batch."""

    def __init__(
        self, client: SpeculationClient, states: RequestState, rows: int, device: torch.device
    ):
        self._client = client
        self._states = states
        # num_sampled and length of each row, on their way to the host
        self._counts = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._pinned = device.type != "cpu"
        self._counts_host = torch.zeros(2, rows, dtype=torch.int32, pin_memory=self._pinned)
        self._arrived = torch.Event(device.type)
        self._temperatures: dict[str, float] = {}

    def add(self, request_id: str, slot: int, tokens: Sequence[int], temperature: float) -> None:
        self._temperatures[request_id] = temperature
        self._client.add(request_id, tokens, temperature)

    def remove(self, request_id: str) -> None:
        self._temperatures.pop(request_id, None)
        self._client.remove(request_id)

    def look_up(
        self,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        drafts: torch.Tensor,
        entries: torch.Tensor | None,
    ) -> None:
        count = batch.num_reqs
        self._counts[0, :count] = num_sampled
        self._counts[1, :count] = self._states.total_len.gpu[batch.idx_mapping]
        self._counts_host.copy_(self._counts, non_blocking=True)
        self._arrived.record()
        self._arrived.synchronize()
        sampled, lengths = self._counts_host.numpy()
        texts = host_texts(self._states)
        found = torch.zeros(drafts.shape, dtype=torch.int64, pin_memory=self._pinned)
        rows, places = [], []
        for place, (request_id, slot) in enumerate(zip(batch.req_ids, batch.idx_mapping_np)):
            text = texts[slot, : lengths[place]]
            found[place] = int(text[-1])
            if sampled[place] and not request_id.startswith(_WARM_UP):
                temperature = self._temperatures.get(request_id, 0.0)
                rows.append(Row(request_id, text, int(sampled[place]), temperature))
                places.append(place)
        of_rows: list[NDArray[np.int64]] = []
        if entries is not None:
            proposed = torch.empty(entries.shape, dtype=torch.int64, pin_memory=self._pinned)
            proposed.copy_(certain(found, entries.shape[-1]))
            of_rows = [proposed[place].numpy() for place in places]
        for place, row, tokens in zip(places, rows, self._client.exchange(rows, count, of_rows)):
            if tokens:
                found[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
                continue
            found[place] = torch.from_numpy(continuation(row.tokens, drafts.shape[1]))
            if entries is not None:
                proposed[place] = certain(found[place], entries.shape[-1])
        drafts.copy_(found, non_blocking=True)
        if entries is not None:
            entries.copy_(proposed, non_blocking=True)


class DeviceLookups:
    """Looks up with a kernel."""

    def __init__(self, client: DeviceClient, states: RequestState):
        self._states = states
        self._client = client
        self.add, self.remove = client.add, client.remove

    def look_up(
        self,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        drafts: torch.Tensor,
        entries: torch.Tensor | None,
    ) -> None:
        lengths, texts = self._states.total_len.gpu, self._states.all_token_ids.gpu
        self._client.exchange(num_sampled, batch.idx_mapping, lengths, texts, drafts, entries)


def host_texts(states: RequestState) -> NDArray[np.int32]:
    """int32 [max_num_reqs, max_model_len]: vLLM keeps texts where the host can read them."""
    tokens = states.all_token_ids
    buffer = getattr(tokens, "_uva_buf", None)
    return buffer.np if buffer is not None else tokens.gpu.cpu().numpy()


def make_lookups(vllm_config: VllmConfig, device: torch.device, states: RequestState) -> Lookups:
    """With a kernel if the device can reach the table, else on the host."""
    config: Any = vllm_config.speculative_config
    parts = connect(Path(config.run_dir), vllm_config)
    if device.type != "cpu":
        from vllm_ssd.pages import register
        from vllm_ssd.target.device import DeviceClient, measure_look_ns

        try:
            register(parts[0], device)
        except OSError as error:
            logger.warning(
                "SSD: the GPU cannot reach the speculation table (%s): drafts are looked up on "
                "the host, and vLLM cannot schedule ahead",
                error,
            )
        else:
            look_ns = measure_look_ns(parts[0], device)
            client = DeviceClient(*parts, device, lambda: host_texts(states), look_ns)
            return DeviceLookups(client, states)
    rows = vllm_config.scheduler_config.max_num_seqs
    return HostLookups(SpeculationClient(*parts), states, rows, device)


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
        if self._tp_group.world_size > 1:
            self._tp_group.broadcast(drafts, src=0)
        # Of greedy requests vLLM's sampler does not ask what their drafts were sampled from.
        if entries is not None and self._sampled[input_batch.idx_mapping_np].any():
            if self._tp_group.world_size > 1:
                self._tp_group.broadcast(entries, src=0)
            assert self._distributions is not None
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
            if self._lookups is not None and not req_id.startswith(_WARM_UP):
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
