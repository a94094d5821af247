"""How Model Runner V2 looks drafts up.

On GPUs a kernel does it, and vLLM can schedule steps ahead. Where the GPU cannot reach the table,
the host does it: each step then waits until the number of sampled tokens has reached the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.log import get_logger
from vllm_ssd.table.draft_probs import certain
from vllm_ssd.worker.client import Row, SpeculationClient
from vllm_ssd.worker.connection import connect
from vllm_ssd.worker.draft_sampling import DraftSampling
from vllm_ssd.worker.guess import continuation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_ssd.worker.confidence import Confidence
    from vllm_ssd.worker.device_client import DeviceClient
    from vllm_ssd.worker.wait_tuner import Limits

logger = get_logger(__name__)

# Prefixes of requests that vLLM makes up to warm its kernels; the draft need not hear of them.
WARM_UP = ("_warmup_", "_v2_mixed_warmup")


class HostLookup:
    """Looks up with numpy. ``rows``: requests of the largest batch."""

    confidence: Confidence | None = None  # it does not say what its drafts are worth

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
        self._samplings: dict[str, DraftSampling] = {}  # of the requests that are drafted for

    def add(
        self, request_id: str, slot: int, tokens: Sequence[int], sampling: DraftSampling
    ) -> None:
        self._samplings[request_id] = sampling
        self._client.add(request_id, tokens, sampling)

    def remove(self, request_id: str) -> None:
        self._samplings.pop(request_id, None)
        self._client.remove(request_id)

    def look_up(
        self,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        drafts: torch.Tensor,
        draft_probs: torch.Tensor | None,
        most_drafts: int,
    ) -> None:
        """Write int64 [num_reqs, k] ``drafts``: rows without any get a guess, shorter ones are
        filled up. num_sampled: int32 [num_reqs], 0 for no outcome; num_rejected: int32 [num_reqs],
        drafts verified and not accepted. draft_probs: int64 [num_reqs, k, top_m], written: what the
        drafts were sampled from; None if top_m is 0. most_drafts: that vLLM verifies of a row."""
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
            if sampled[place] and request_id in self._samplings:
                sampling = self._samplings[request_id]
                rows.append(Row(request_id, text, int(sampled[place]), sampling))
                places.append(place)
        of_rows: list[NDArray[np.int64]] = []
        if draft_probs is not None:
            proposed = torch.empty(draft_probs.shape, dtype=torch.int64, pin_memory=self._pinned)
            proposed.copy_(certain(found, draft_probs.shape[-1]))
            of_rows = [proposed[place].numpy() for place in places]
        for place, row, tokens in zip(
            places,
            rows,
            self._client.exchange(rows, count, batch.has_prefill, of_rows, most_drafts),
        ):
            if tokens:
                found[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
                continue
            found[place] = torch.from_numpy(continuation(row.tokens, drafts.shape[1]))
            if draft_probs is not None:
                proposed[place] = certain(found[place], draft_probs.shape[-1])
        drafts.copy_(found, non_blocking=True)
        if draft_probs is not None:
            draft_probs.copy_(proposed, non_blocking=True)

    def go_without(self, batch: InputBatch) -> None:
        """In place of ``look_up`` in a step that verified no drafts, before one that vLLM has
        scheduled without."""
        rows = sum(
            got_token and request_id in self._samplings
            for request_id, got_token in zip(batch.req_ids, _got_token(batch))
        )
        self._client.go_without(rows, batch.num_reqs, batch.has_prefill)


class DeviceLookup:
    """The same with a kernel."""

    def __init__(self, client: DeviceClient, states: RequestState):
        self._states = states
        self._client = client
        self.add, self.remove = client.add, client.remove
        self.confidence = client.confidence

    def look_up(
        self,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        drafts: torch.Tensor,
        draft_probs: torch.Tensor | None,
        most_drafts: int,
    ) -> None:
        lengths, texts = self._states.total_len.gpu, self._states.all_token_ids.gpu
        self._client.exchange(
            num_sampled,
            num_rejected,
            batch.idx_mapping,
            lengths,
            texts,
            drafts,
            draft_probs,
            batch.has_prefill,
            most_drafts,
        )

    def go_without(self, batch: InputBatch) -> None:
        """As ``HostLookup``'s."""
        slots = batch.idx_mapping_np[_got_token(batch)]
        self._client.go_without(slots, batch.num_reqs, batch.has_prefill)


def _got_token(batch: InputBatch) -> NDArray[np.bool_]:
    """bool [num_reqs]: of each request of a step, whether nothing was left of its prompt."""
    seen = batch.num_computed_tokens_np + batch.num_scheduled_tokens
    got_token: NDArray[np.bool_] = seen >= batch.prefill_len_np
    return got_token


def host_texts(states: RequestState) -> NDArray[np.int32]:
    """int32 [max_num_reqs, max_model_len], from vLLM's own buffer in host memory if it has one."""
    tokens = states.all_token_ids
    buffer = getattr(tokens, "_uva_buf", None)
    return buffer.np if buffer is not None else tokens.gpu.cpu().numpy()


def make_draft_lookup(
    vllm_config: VllmConfig, device: torch.device, states: RequestState
) -> HostLookup | DeviceLookup:
    """By a kernel if the device can reach the table, else by the host; raises as ``connect``."""
    config: Any = vllm_config.speculative_config
    connection = connect(Path(config.run_dir), vllm_config)
    if device.type != "cpu":
        from vllm_ssd.table.pages import register
        from vllm_ssd.worker.device_client import DeviceClient, measure_look_ns

        try:
            register(connection.table, device)
        except OSError as error:
            logger.warning(
                "SSD: the GPU cannot reach the speculation table (%s): drafts are looked up on "
                "the host, and vLLM cannot schedule ahead",
                error,
            )
        else:
            look_ns = measure_look_ns(connection.table, device)
            limits: Limits = "vLLM" if config.enable_adaptive_verification else "nobody"
            client = DeviceClient(connection, device, lambda: host_texts(states), look_ns, limits)
            client.compile_kernel(states.total_len.gpu, states.all_token_ids.gpu)
            return DeviceLookup(client, states)
    rows = vllm_config.scheduler_config.max_num_seqs
    return HostLookup(SpeculationClient(connection), states, rows, device)
