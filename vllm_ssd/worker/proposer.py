"""A thin proposer for Model Runner V1, for vLLM's method ``custom_class``.

vLLM gives the proposer sampled tokens, but no request ids and no word of requests that come and go.
Wrappers of two methods of the model runner provide both (``hooks/runner_v1.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_ssd.worker.client import Row, SpeculationClient
from vllm_ssd.worker.connection import connect
from vllm_ssd.worker.dense_probs import dense
from vllm_ssd.worker.draft_limit import most_that_fit
from vllm_ssd.worker.draft_sampling import draft_sampling

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class SSDProposer:
    """One per worker. Only TP rank 0 talks to the draft; the others receive what it found."""

    def __init__(self, vllm_config: VllmConfig):
        from vllm.distributed.parallel_state import get_tp_group

        config: Any = vllm_config.speculative_config
        self._tp_group = get_tp_group()
        self._runner: GPUModelRunner | None = None
        self._client: SpeculationClient | None = None
        self._k, self._top_m = config.k, config.top_m
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        # Distributions of the draft tokens proposed last, int64 [rows, k, top_m]; None if all are
        # certain, which vLLM assumes anyway.
        self._draft_probs: NDArray[np.int64] | None = None
        limits = vllm_config.scheduler_config
        most = [config.k] * (1 + limits.max_num_seqs)
        if config.schedule is not None:
            most = build_dynamic_sd_schedule_lookup(config.schedule, limits.max_num_seqs, config.k)
        budget = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
        # By requests of the batch, with room for another one.
        self._most_drafts = [min(n, most_that_fit(budget, rows + 1)) for rows, n in enumerate(most)]
        if self._tp_group.is_first_rank:
            self._client = SpeculationClient(connect(vllm_config))

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Nothing to load here: the draft model lives in its own process."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return 0..k draft tokens for each row of the batch; none for rows that did not sample."""
        if self._client is None:
            drafts: list[list[int]]
            drafts, self._draft_probs = self._tp_group.broadcast_object(None, src=0)
            return drafts
        assert self._runner is not None
        rows: list[Row] = []
        places: list[int] = []
        for index, sampled in enumerate(sampled_token_ids):
            if sampled:
                name = self._runner.input_batch.req_ids[index]
                sampling = draft_sampling(self._runner.requests[name].sampling_params)
                if sampling is not None:
                    text = token_ids_cpu[index, : num_tokens_no_spec[index]]
                    rows.append(Row(name, text, len(sampled), sampling))
                    places.append(index)
        drafts = [[] for _ in sampled_token_ids]
        draft_probs = np.zeros((len(drafts), self._k, self._top_m), np.int64)
        found = self._client.exchange(rows, len(drafts), self._most_drafts[len(drafts)])
        for index, row, of_row in zip(places, rows, found):
            drafts[index] = of_row
            if of_row:
                probs = self._client.slots.states[row.request_id].draft_probs
                draft_probs[index, : len(of_row)] = probs[: len(of_row)]
        self._draft_probs = (
            draft_probs if self._top_m and any(row.sampling.temperature for row in rows) else None
        )
        if self._tp_group.world_size > 1:
            self._tp_group.broadcast_object((drafts, self._draft_probs), src=0)
        return drafts

    def on_update(self, runner: GPUModelRunner, output: SchedulerOutput) -> None:
        """Take in which requests come and go in this step, before the target's forward."""
        self._runner = runner
        if self._client is None:
            return
        for request_id in output.finished_req_ids:
            self._client.remove(request_id)
        for name, state in self._client.slots.states.items():
            if name in output.num_scheduled_tokens:  # a grammar may have refused some
                state.handed_over = len(output.scheduled_spec_decode_tokens.get(name, ()))
        for new in output.scheduled_new_reqs:
            sampling = draft_sampling(new.sampling_params)
            if new.prompt_token_ids is not None and sampling is not None:
                self._client.add(new.req_id, new.prompt_token_ids, sampling)

    def on_proposed(self, runner: GPUModelRunner) -> None:
        """Give vLLM the distributions of the draft tokens that it has taken. Without them it takes
        the tokens as certain, which is exact too but accepts fewer."""
        if self._draft_probs is not None:
            draft_probs = torch.from_numpy(self._draft_probs)
            runner._draft_probs = dense(draft_probs, self._vocab_size).to(runner.device)
            runner._draft_prob_req_ids = runner.input_batch.req_ids.copy()
