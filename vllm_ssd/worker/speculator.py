"""A thin speculator for Model Runner V2. ``device_client.py`` looks up the draft tokens that it
proposes. ``hooks/runner_v2.py`` tells it which requests come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_ssd.table.pages import REMEDY, register
from vllm_ssd.worker.connection import connect
from vllm_ssd.worker.dense_probs import DraftLogits
from vllm_ssd.worker.device_client import DeviceClient
from vllm_ssd.worker.draft_sampling import draft_sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

# Prefixes of requests that vLLM makes up to warm its kernels; the draft need not hear of them.
WARM_UP = ("_warmup_", "_v2_mixed_warmup")


class SSDSpeculator(BaseSpeculator):
    """One per worker of the last pipeline stage. Only TP rank 0 talks to the draft; the others
    receive what it found, and vLLM sends it to the other stages."""

    supports_mm_inputs = False
    draft_logits: torch.Tensor | None = None  # drafts are tokens, each proposed with certainty

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState):
        config: Any = vllm_config.speculative_config
        self._tp_group = get_tp_group()
        rows = vllm_config.scheduler_config.max_num_seqs
        self._drafts = torch.zeros(rows, config.k, dtype=torch.int64, device=device)
        self._draft_logits: DraftLogits | None = None
        of_drafts = rows, config.k, config.top_m
        self._draft_probs = torch.zeros(of_drafts, dtype=torch.int64, device=device)
        if config.top_m:
            vocab_size = vllm_config.model_config.get_vocab_size()
            self._draft_logits = DraftLogits(rows, config.k, config.top_m, vocab_size, device)
            self.draft_logits = self._draft_logits.logits
        self._sampled = np.zeros(rows, np.bool_)  # by slot: its request is not greedy
        self.has_proposed = True  # in the last step
        self._client: DeviceClient | None = None
        # Every rank chooses a step's budget and draft tokens, from the first rank's confidences.
        self.enable_adaptive_verification = bool(config.enable_adaptive_verification)
        if self._tp_group.is_first_rank:
            self._client = connected_client(vllm_config, device, req_states)
            self._confidences = self._client.confidence.both
        else:
            self._confidences = torch.zeros(2, rows, config.k, dtype=torch.float32, device=device)
        self.draft_token_confidence_probs, self.expected_confidence_probs = self._confidences

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: the draft model runs in another process and has no graphs here."""

    def capture(self) -> None:
        """Do nothing: this process has no draft model to capture."""

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
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **__: Any,
    ) -> torch.Tensor:
        """Return draft tokens, int64 [num_reqs, k], in batch order. V2 may verify k tokens of every
        request, so rows without draft tokens get a guess and others are filled up. The draft hears
        only of its own tokens. ``draft_token_confidence_probs``, float32 [max_num_seqs, k], has
        the chance of each.

        num_speculative_tokens: the most that V2 will verify of a row, k if not given. If it is 0,
        V2 reads no draft tokens, and the step must not take longer than plain vLLM's. But if this
        step has verified draft tokens, they have to be counted."""
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts.zero_()
        self.has_proposed = num_speculative_tokens != 0 or input_batch.num_draft_tokens > 0
        if not self.has_proposed:
            if self._client is not None:
                slots = input_batch.idx_mapping_np[_got_token(input_batch)]
                self._client.go_without(slots, input_batch.num_reqs, input_batch.has_prefill)
            return drafts
        draft_probs = self._draft_probs[: input_batch.num_reqs]
        if self._client is not None:
            self._client.exchange(
                num_sampled,
                num_rejected,
                input_batch.idx_mapping,
                drafts,
                draft_probs,
                input_batch.has_prefill,
                num_speculative_tokens,
            )
        self._tp_group.broadcast(drafts, src=0)  # does nothing in a group of one
        if self.enable_adaptive_verification:
            self._tp_group.broadcast(self._confidences, src=0)
        # vLLM's sampler does not read the distributions of greedy requests' drafts.
        sampled = self._sampled[input_batch.idx_mapping_np].any()
        if sampled and self._draft_logits is not None:
            self._tp_group.broadcast(draft_probs, src=0)
            self._draft_logits.update(input_batch.idx_mapping, draft_probs, temperature)
        return drafts

    def on_added(
        self, request_id: str, slot: int, tokens: Sequence[int], params: SamplingParams | None
    ) -> None:
        """Take in that vLLM has given a request this slot. tokens: the request's text so far."""
        self._sampled[slot] = params is not None and params.temperature > 0
        sampling = draft_sampling(params)
        if self._client is None or sampling is None or request_id.startswith(WARM_UP):
            return
        self._client.add(request_id, slot, tokens, sampling)

    def on_removed(self, request_id: str) -> None:
        """Take in that a request leaves its slot."""
        if self._client is not None:
            self._client.remove(request_id)


def connected_client(
    vllm_config: VllmConfig, device: torch.device, states: RequestState
) -> DeviceClient:
    """Connect the GPU to the engine's table. ``RuntimeError`` if the GPU cannot reach the table;
    also raises the errors of ``connect``."""
    connection = connect(vllm_config)
    try:
        register(connection.table, device)
    except OSError as error:
        raise RuntimeError(
            f"SSD: the GPU cannot reach the speculation table ({error}): {REMEDY}"
        ) from error
    client = DeviceClient(connection, states.total_len.gpu, states.all_token_ids.gpu)
    client.compile_kernel()
    return client


def _got_token(batch: InputBatch) -> NDArray[np.bool_]:
    """Return bool [num_reqs]: whether each request's prompt ended in this step or before."""
    seen = batch.num_computed_tokens_np + batch.num_scheduled_tokens
    got_token: NDArray[np.bool_] = seen >= batch.prefill_len_np
    return got_token
