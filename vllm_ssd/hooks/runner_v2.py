"""Model Runner V2: it gets its speculator from a function, and tells its ``RequestState`` alone
which requests come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Where, apply
from vllm_ssd.log import get_logger

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
    from vllm.v1.worker.gpu.states import RequestState

logger = get_logger(__name__)

# The attribute of a runner's ``RequestState`` that holds the speculator to tell.
SPECULATOR = "_ssd_speculator"


def with_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_speculator(
        vllm_config: VllmConfig, device: Any, req_states: RequestState, *args: Any, **kwargs: Any
    ) -> Any:
        if not uses_ssd(vllm_config):
            return original(vllm_config, device, req_states, *args, **kwargs)
        from vllm_ssd.worker.speculator import SSDSpeculator

        apply(Where.WORKER_V2)
        speculator = SSDSpeculator(vllm_config, device, req_states)
        setattr(req_states, SPECULATOR, speculator)
        return speculator

    return init_speculator


def with_new_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before requests are added: only the scheduler's output has their sampling settings."""

    def add_requests(self: GPUModelRunner, scheduler_output: SchedulerOutput) -> Any:
        speculator = getattr(self.req_states, SPECULATOR, None)
        if speculator is not None:
            speculator.before_add(scheduler_output)
        return original(self, scheduler_output)

    return add_requests


def with_added_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(
        self: RequestState, req_id: str, *args: Any, all_token_ids: list[int], **kwargs: Any
    ) -> Any:
        result = original(self, req_id, *args, all_token_ids=all_token_ids, **kwargs)
        speculator = getattr(self, SPECULATOR, None)
        if speculator is not None:
            speculator.on_added(req_id, self.req_id_to_index[req_id], all_token_ids)
        return result

    return add_request


def with_removed_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def remove_request(self: RequestState, req_id: str) -> Any:
        speculator = getattr(self, SPECULATOR, None)
        if speculator is not None:
            speculator.on_removed(req_id)
        return original(self, req_id)

    return remove_request


def with_two_confidences(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM chooses a step's number of drafts by confidences of an earlier step, and the drafts by
    those of the step itself; ssd has two answers, as which row will have drafts is chance."""

    def record_confidences(
        self: AdaptiveVerificationManager, confidence_probs: torch.Tensor, input_batch: InputBatch
    ) -> None:
        speculator = getattr(self.req_states, SPECULATOR, None)
        if speculator is None:
            original(self, confidence_probs, input_batch)
            return
        original(self, speculator.expected_confidence_probs, input_batch)
        current = speculator.draft_token_confidence_probs[: input_batch.num_reqs]
        self._confidence_probs[input_batch.idx_mapping] = current

    return record_confidences


def with_trimming_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at start-up what vLLM would compile in the first step that trims drafts, which takes
    seconds."""

    def set_initial_cost_curves(self: AdaptiveVerificationManager, samples: Any) -> None:
        original(self, samples)
        if getattr(self.req_states, SPECULATOR, None) is not None:
            compile_trimming(self)

    return set_initial_cost_curves


def compile_trimming(manager: AdaptiveVerificationManager) -> None:
    """For one row and for several, as torch compiles these apart, and for all budgets from 2 on."""
    import torch
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    states = manager.req_states
    k = states.num_speculative_steps
    for rows in (1, 2, 3):
        if rows <= states.max_num_reqs:
            slots = torch.arange(rows, device=states.device)
            for budget in (1, 2, 3):
                capacities = torch.full((rows,), k, dtype=torch.int32, device=states.device)
                if budget < rows * k:
                    adaptive_verification._assign_draft_token_budget_compiled(
                        manager._confidence_probs, slots, capacities, budget, k
                    )


def with_fixed_verification(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where the target's attention cannot verify rows of unequal length, ssd verifies k drafts of
    each row, as if adaptive verification had not been turned on."""

    def initialize_kv_cache(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        sampler = getattr(self, "rejection_sampler", None)
        if getattr(self.req_states, SPECULATOR, None) is not None and sampler is not None:
            sampler.enable_adaptive_verification = self.adaptive_verification is not None
        return result

    return initialize_kv_cache


def with_refusal_heeded(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_create_adaptive_verification_manager(**kwargs: Any) -> Any:
        try:
            return original(**kwargs)
        except ValueError as error:
            config: Any = kwargs["vllm_config"]
            if not uses_ssd(config) or config.speculative_config.asked_for_adaptive_verification:
                raise
            logger.info("SSD: every row's k drafts are verified, at any load (%s)", error)
            return None

    return maybe_create_adaptive_verification_manager
