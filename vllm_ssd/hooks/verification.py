"""Hooks into vLLM's adaptive verification, under Model Runner V2. It chooses the draft tokens to
verify by ssd's confidences and by the measured costs of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original
from vllm_ssd.hooks.runner_v2 import SPECULATOR
from vllm_ssd.log import get_logger
from vllm_ssd.worker.step_costs import (
    KV_STEPS,
    STEPS,
    kv_batch,
    kv_token_ms,
    sizes_to_measure,
)

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.async_utils import StepTimingSample
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

logger = get_logger(__name__)

# Attributes of a manager: KV tokens per request in the steps that are measured with KV, and the
# milliseconds that one KV token adds to a step.
_KV_TOKENS, _KV_TOKEN_MS = "_ssd_kv_tokens", "_ssd_kv_token_ms"


def with_two_confidences(
    original: Original,
    self: AdaptiveVerificationManager,
    confidence_probs: torch.Tensor,
    input_batch: InputBatch,
) -> None:
    """Give vLLM ssd's expected and current confidences. vLLM chooses a step's number of draft
    tokens by confidences of an earlier step, and the tokens by those of the step itself. ssd states
    both, because it is chance which rows will have draft tokens."""
    speculator = getattr(self.req_states, SPECULATOR, None)
    if speculator is None:
        original(self, confidence_probs, input_batch)
        return
    if not speculator.has_proposed:
        return
    original(self, speculator.expected_confidence_probs, input_batch)
    current = speculator.draft_token_confidence_probs[: input_batch.num_reqs]
    self._confidence_probs[input_batch.idx_mapping] = current


def with_kv_measured_apart(
    original: Original, self: AdaptiveVerificationManager, capture_sizes: list[int]
) -> Iterator[dict[str, int]]:
    """Choose the steps to measure at start-up; ``step_costs.py`` gives the reasons."""
    batches = list(original(self, capture_sizes))
    if getattr(self.req_states, SPECULATOR, None) is None or not batches:
        yield from batches
        return
    vllms = sorted({batch["num_tokens"] for batch in batches})
    sizes = sizes_to_measure(vllms, self._cudagraph_limit)
    for size in sizes:
        for _ in range(STEPS):
            yield {"num_tokens": size, "context_len": 0}
    longest = max(batch["context_len"] for batch in batches)
    with_kv = kv_batch(sizes, self.req_states.max_model_len, longest)
    setattr(self, _KV_TOKENS, with_kv["context_len"])
    for _ in range(KV_STEPS):
        yield with_kv


def with_costs_taken_in(
    original: Original,
    self: AdaptiveVerificationManager,
    samples: Sequence[StepTimingSample],
) -> None:
    """Take in the times of the measured steps. Also compile what vLLM would compile in the first
    step that trims draft tokens, which takes seconds."""
    kv_tokens = getattr(self, _KV_TOKENS, 0)
    if not kv_tokens:
        original(self, samples)
        return
    from vllm.distributed.parallel_state import get_tp_group

    original(self, samples[:-KV_STEPS])
    # Every rank chooses what is verified, and all must choose alike.
    ms = get_tp_group().broadcast_object(kv_token_ms(samples, kv_tokens), src=0)
    setattr(self, _KV_TOKEN_MS, ms)
    compile_trimming(self)


def with_kv_counted(
    original: Original,
    self: AdaptiveVerificationManager,
    num_tokens_per_req: Mapping[str, int],
    draft_tokens: Mapping[str, Sequence[int]],
) -> Any:
    """Add the reading of KV to a step's cost, whatever is verified. It takes the place of vLLM's
    draft cost, a table by number of requests, because ssd's draft costs the target nothing."""
    ms = getattr(self, _KV_TOKEN_MS, None)
    if ms is not None and self.cost_tables is not None:
        states = self.req_states
        slots = [states.req_id_to_index[request_id] for request_id in num_tokens_per_req]
        kv_ms = float(ms * states.num_computed_tokens_np[slots].sum())
        by_requests = np.broadcast_to(kv_ms, (states.max_num_reqs + 1,))
        self.cost_tables = by_requests, self.cost_tables[1]
    return original(self, num_tokens_per_req, draft_tokens)


def compile_trimming(manager: AdaptiveVerificationManager) -> None:
    """Compile vLLM's trimming for one row and for several, because torch compiles these apart, and
    for all budgets from 2 on. Uses the manager's own tensors, because torch compiles anew for
    tensors made in inference mode."""
    import torch
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

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
    sampler = getattr(self, "rejection_sampler", None)
    if getattr(self.req_states, SPECULATOR, None) is not None and sampler is not None:
        sampler.enable_adaptive_verification = self.adaptive_verification is not None
    return result


def with_refusal_heeded(original: Original, *, vllm_config: Any, **kwargs: Any) -> Any:
    try:
        return original(vllm_config=vllm_config, **kwargs)
    except ValueError as error:
        speculation = vllm_config.speculative_config
        if not uses_ssd(vllm_config) or speculation.asked_for_adaptive_verification:
            raise
        logger.info("SSD: every row's k drafts are verified, at any load (%s)", error)
        return None
