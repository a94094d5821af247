"""Model Runner V2: a speculator that looks the drafts up on the host.

Each step it waits for the sampled counts to reach the CPU, exchanges with the draft, and sends the
drafts back to the device. (A lookup on the device, without that wait, takes its place next.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_ssd.target.client import Row, make_client

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

# Requests that vLLM makes up to warm its kernels; the draft need not hear of them.
_WARM_UP = ("_warmup_", "_v2_mixed_warmup")


class SSDSpeculator(BaseSpeculator):
    """One per worker. Only TP rank 0 talks to the draft; the others receive what it found."""

    supports_mm_inputs = False
    draft_logits = None  # drafts are tokens, each proposed with certainty

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState):
        config: Any = vllm_config.speculative_config
        self._k: int = config.k
        self._states = req_states
        self._tp_group = get_tp_group()
        rows = vllm_config.scheduler_config.max_num_seqs
        pinned = {"pin_memory": device.type != "cpu"}
        self._drafts = torch.zeros(rows, self._k, dtype=torch.int64, device=device)
        self._drafts_host = torch.zeros(rows, self._k, dtype=torch.int64, **pinned)
        # num_sampled and length of each row, on their way to the host
        self._counts = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._counts_host = torch.zeros(2, rows, dtype=torch.int32, **pinned)
        self._arrived = torch.Event(device.type)
        self._client = None
        if self._tp_group.is_first_rank:
            self._client = make_client(Path(config.run_dir), vllm_config)
            self._follow(req_states)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """The draft model is elsewhere: there is nothing to capture."""

    def capture(self) -> None:
        """Likewise."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> torch.Tensor:
        """int64 [num_reqs, k], in batch order. V2 verifies k tokens of every request, so rows with
        fewer drafts repeat their newest token; the draft is told of the real ones only."""
        count = input_batch.num_reqs
        drafts = self._drafts[:count]
        if dummy_run:
            return drafts.zero_()
        if self._client is not None:
            lengths = self._states.total_len.gpu[input_batch.idx_mapping]
            self._counts[0, :count] = num_sampled
            self._counts[1, :count] = lengths
            self._counts_host.copy_(self._counts, non_blocking=True)
            self._arrived.record()
            self._arrived.synchronize()
            self._look_up(input_batch)
            drafts.copy_(self._drafts_host[:count], non_blocking=True)
        if self._tp_group.world_size > 1:
            self._tp_group.broadcast(drafts, src=0)
        return drafts

    def _look_up(self, batch: InputBatch) -> None:
        assert self._client is not None
        texts = self._texts()
        sampled, lengths = self._counts_host.numpy()
        rows, places = [], []
        for place, (request_id, slot) in enumerate(zip(batch.req_ids, batch.idx_mapping_np)):
            text = texts[slot, : lengths[place]]
            self._drafts_host[place] = int(text[-1])
            if sampled[place] and not request_id.startswith(_WARM_UP):
                rows.append(Row(request_id, text, int(sampled[place])))
                places.append(place)
        for place, found in zip(places, self._client.exchange(rows)):
            self._drafts_host[place, : len(found)] = torch.tensor(found, dtype=torch.int64)

    def _texts(self) -> np.ndarray:
        """int32 [max_num_reqs, max_model_len]: vLLM keeps texts where the host can read them."""
        tokens = self._states.all_token_ids
        buffer = getattr(tokens, "_uva_buf", None)
        return buffer.np if buffer is not None else tokens.gpu.cpu().numpy()

    def _follow(self, states: RequestState) -> None:
        """Hear of requests that come and go: V2 tells its request states and nobody else."""
        client = self._client
        assert client is not None
        add_request: Callable[..., Any] = states.add_request
        remove_request: Callable[..., Any] = states.remove_request

        def add(req_id: str, *args: Any, all_token_ids: list[int], **kwargs: Any) -> Any:
            result = add_request(req_id, *args, all_token_ids=all_token_ids, **kwargs)
            if not req_id.startswith(_WARM_UP):
                client.add(req_id, all_token_ids)
            return result

        def remove(req_id: str) -> Any:
            client.remove(req_id)
            return remove_request(req_id)

        states.add_request = add
        states.remove_request = remove
