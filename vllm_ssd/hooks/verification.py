"""Hooks into vLLM's adaptive verification, under Model Runner V2. It chooses the draft tokens to
verify by ssd's confidences and by the measured costs of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original, put_before
from vllm_ssd.hooks.runner_v2 import SPECULATOR
from vllm_ssd.log import get_logger
from vllm_ssd.worker.step_costs import KV_STEPS, STEPS, kv_batch, kv_token_ms, sizes_to_measure

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import StepTimingSample
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = get_logger(__name__)


def with_own_manager(
    original: Original, *, vllm_config: Any, **kwargs: Any
) -> AdaptiveVerificationManager | None:
    """Make vLLM's manager an ``OwnManager``. Without one if vLLM refuses, unless the user asked for
    adaptive verification."""
    try:
        manager: Any = original(vllm_config=vllm_config, **kwargs)
    except ValueError as error:
        speculation = vllm_config.speculative_config
        if not uses_ssd(vllm_config) or speculation.asked_for_adaptive_verification:
            raise
        logger.info("SSD: all k draft tokens of each row are verified (%s)", error)
        return None
    if manager is not None and uses_ssd(vllm_config):
        put_before(OwnManager, manager)
        manager._expected = torch.ones_like(manager._confidence_probs)
    return manager


class OwnManager(AdaptiveVerificationManager):
    """vLLM's manager in an engine with ssd."""

    # KV tokens per request in the steps that are measured with KV, and the milliseconds that one KV
    # token adds to a step.
    _kv_tokens = 0
    _kv_token_ms: float | None = None
    cost_tables: Any  # vLLM's, by requests and by tokens
    _confidence_probs: torch.Tensor  # vLLM's: float32 [slots, k], which rank the draft tokens
    _expected: torch.Tensor  # float32 [slots, k]: chances that the budget is chosen by

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """Record ssd's expected and current confidences. vLLM chooses a step's number of draft
        tokens by confidences of an earlier step, and the tokens by those of the step itself. ssd
        states both, because it is chance which rows will have draft tokens.

        vLLM copies the confidences of all rows to the host. Current ones of a row that misses steps
        are those of its pending draft tokens, and must not decide how many of these are verified.
        So the copied ones have a tensor of their own."""
        speculator = getattr(self.req_states, SPECULATOR)
        if not speculator.has_proposed:
            return
        for slot in self._pending_resets:  # of new requests, as vLLM resets the current ones
            self._expected[slot].fill_(1.0)
        current, self._confidence_probs = self._confidence_probs, self._expected
        super().record_confidences(speculator.expected_confidence_probs, input_batch)
        self._confidence_probs = current
        of_step = speculator.draft_token_confidence_probs[: input_batch.num_reqs]
        current[input_batch.idx_mapping] = of_step

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Choose the steps to measure at start-up; ``step_costs.py`` gives the reasons."""
        batches = list(super().batches_to_profile(capture_sizes))
        if not batches:
            return
        vllms = sorted({batch["num_tokens"] for batch in batches})
        sizes = sizes_to_measure(vllms, self._cudagraph_limit)
        for size in sizes:
            for _ in range(STEPS):
                yield {"num_tokens": size, "context_len": 0}
        longest = max(batch["context_len"] for batch in batches)
        with_kv = kv_batch(sizes, self.req_states.max_model_len, longest)
        self._kv_tokens = with_kv["context_len"]
        for _ in range(KV_STEPS):
            yield with_kv

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """Take in the times of the measured steps. Also compile what vLLM would compile in the
        first step that trims draft tokens, which takes seconds."""
        if not self._kv_tokens:
            super().set_initial_cost_curves(samples)
            return
        super().set_initial_cost_curves(samples[:-KV_STEPS])
        # Every rank chooses what is verified, and all must choose alike.
        ms = kv_token_ms(samples, self._kv_tokens)
        self._kv_token_ms = get_tp_group().broadcast_object(ms, src=0)
        compile_trimming(self)

    def get_num_tokens(
        self, num_tokens_per_req: Mapping[str, int], draft_tokens: Mapping[str, Sequence[int]]
    ) -> Any:
        """Add the reading of KV to a step's cost, whatever is verified. It takes the place of
        vLLM's draft cost, a table by number of requests, because ssd's draft costs the target
        nothing."""
        if self._kv_token_ms is not None and self.cost_tables is not None:
            states = self.req_states
            slots = [states.req_id_to_index[request_id] for request_id in num_tokens_per_req]
            kv_ms = float(self._kv_token_ms * states.num_computed_tokens_np[slots].sum())
            by_requests = np.broadcast_to(kv_ms, (states.max_num_reqs + 1,))
            self.cost_tables = by_requests, self.cost_tables[1]
        return super().get_num_tokens(num_tokens_per_req, draft_tokens)


def compile_trimming(manager: AdaptiveVerificationManager) -> None:
    """Compile vLLM's trimming for one row and for several, because torch compiles these apart, and
    for all budgets from 2 on. Uses the manager's own tensors, because torch compiles anew for
    tensors made in inference mode."""
    states = manager.req_states
    k = states.num_speculative_steps
    for rows in (1, 2, 3):
        if rows <= states.max_num_reqs:
            slots = torch.arange(rows, device=states.device)
            for budget in (1, 2, 3):
                capacities = manager._batch_draft_capacity[:rows].fill_(k)
                if budget < rows * k:
                    adaptive_verification._assign_draft_token_budget_compiled(
                        manager._confidence_probs, slots, capacities, budget, k
                    )


def with_fixed_verification(
    original: Original, self: GPUModelRunner, *args: Any, **kwargs: Any
) -> Any:
    """Where the target's attention cannot verify rows of unequal length, ssd verifies k drafts of
    each row, as if adaptive verification had not been turned on."""
    result = original(self, *args, **kwargs)
    sampler = self.rejection_sampler
    if getattr(self.req_states, SPECULATOR, None) is not None and sampler is not None:
        sampler.enable_adaptive_verification = self.adaptive_verification is not None
    return result
