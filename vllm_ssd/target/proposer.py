"""Model Runner V1: vLLM's ``custom_class`` proposer, thin.

vLLM gives the proposer sampled tokens but no request ids and no word of requests that come and
go; both are taken from the model runner, by wrapping two of its methods when the proposer is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.patching import patch
from vllm_ssd.target.client import Row, SpeculationClient, make_client
from vllm_ssd.target.cpu_sampling import repair_sampling
from vllm_ssd.target.distributions import dense

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class SSDProposer:
    """One per worker. Only TP rank 0 talks to the draft; the others receive what it found."""

    def __init__(self, vllm_config: VllmConfig):
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.platforms import current_platform

        config: Any = vllm_config.speculative_config
        self._tp_group = get_tp_group()
        self._runner: GPUModelRunner | None = None
        self._client: SpeculationClient | None = None
        self._k, self._top_m = config.k, config.top_m
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        # What the drafts proposed last were sampled from, int64 [rows, k, top_m]; None if all are
        # the likeliest tokens, which vLLM takes them for anyway.
        self._entries: NDArray[np.int64] | None = None
        if self._tp_group.is_first_rank:
            self._client = make_client(Path(config.run_dir), vllm_config)
        _follow_runners()
        if current_platform.is_cpu():
            repair_sampling()

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Nothing to load here: the draft model lives in its own process."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for each row of the batch, 0..k of them; none for rows that did not sample."""
        if self._client is None:
            drafts: list[list[int]]
            drafts, self._entries = self._tp_group.broadcast_object(None, src=0)
            return drafts
        assert self._runner is not None
        rows: list[Row] = []
        places: list[int] = []
        for index, sampled in enumerate(sampled_token_ids):
            if sampled:
                text = token_ids_cpu[index, : num_tokens_no_spec[index]]
                name = self._runner.input_batch.req_ids[index]
                temperature = _temperature(self._runner.requests[name].sampling_params)
                rows.append(Row(name, text, len(sampled), temperature))
                places.append(index)
        drafts = [[] for _ in sampled_token_ids]
        entries = np.zeros((len(drafts), self._k, self._top_m), np.int64)
        of_rows = [entries[index] for index in places]
        for index, found in zip(places, self._client.exchange(rows, len(drafts), of_rows)):
            drafts[index] = found
        self._entries = entries if self._top_m and any(row.temperature for row in rows) else None
        if self._tp_group.world_size > 1:
            self._tp_group.broadcast_object((drafts, self._entries), src=0)
        return drafts

    def on_update(self, runner: GPUModelRunner, output: SchedulerOutput) -> None:
        """The scheduler's word on who comes and who goes, before the target's forward."""
        self._runner = runner
        if self._client is None:
            return
        for request_id in output.finished_req_ids:
            self._client.remove(request_id)
        for new in output.scheduled_new_reqs:
            if new.prompt_token_ids is not None:
                temperature = _temperature(new.sampling_params)
                self._client.add(new.req_id, new.prompt_token_ids, temperature)

    def on_proposed(self, runner: GPUModelRunner) -> None:
        """vLLM has taken the drafts: tell it what they were sampled from. Without this it takes
        them for certain, which is exact as well."""
        if self._entries is not None:
            entries = torch.from_numpy(self._entries)
            runner._draft_probs = dense(entries, self._vocab_size).to(runner.device)
            runner._draft_prob_req_ids = runner.input_batch.req_ids.copy()


def _temperature(params: SamplingParams | None) -> float:
    return params.temperature if params is not None else 0.0


def _follow_runners() -> None:
    """Have every V1 model runner of this process tell its proposer of scheduler outputs, and of
    drafts that it has taken."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    patch(GPUModelRunner, "_update_states", _telling_of_updates)
    patch(GPUModelRunner, "propose_draft_token_ids", _telling_of_drafts)


def _telling_of_updates(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_states(self: GPUModelRunner, scheduler_output: SchedulerOutput) -> Any:
        result = original(self, scheduler_output)
        proposer = getattr(self, "drafter", None)
        if isinstance(proposer, SSDProposer):
            proposer.on_update(self, scheduler_output)
        return result

    return _update_states


def _telling_of_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def propose_draft_token_ids(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        proposer = getattr(self, "drafter", None)
        if isinstance(proposer, SSDProposer):
            proposer.on_proposed(self)
        return result

    return propose_draft_token_ids
