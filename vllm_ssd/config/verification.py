"""Turns on vLLM's adaptive verification where it is possible and the user has not decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

# Attention backends that can verify rows whose lengths only the GPU knows. None: vLLM chooses.
_BACKENDS = {None, "FLASH_ATTN", "TRITON_ATTN", "ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN"}


def choose_verification(config: VllmConfig) -> None:
    """Set ``enable_adaptive_verification`` in a complete config with ssd, if the user did not.

    The conditions are vLLM's own: vLLM raises an error where they are not met.
    Source: ``VllmConfig._validate_adaptive_verification`` of vLLM 0.33."""
    speculation: Any = config.speculative_config
    if speculation.enable_adaptive_verification is None:
        speculation.enable_adaptive_verification = _is_possible(config)


def has_states(target: ModelConfig) -> bool:
    """Whether the target has state-space or linear layers."""
    return bool(target.is_hybrid or target.is_attention_free)


def verifies_all(target: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether vLLM will verify all draft tokens, as far as a target and its stages tell."""
    return has_states(target) or parallel.pipeline_parallel_size > 1


def _is_possible(config: VllmConfig) -> bool:
    backend = getattr(config.attention_config.backend, "name", None)
    model: Any = config.model_config
    return bool(
        config.use_v2_model_runner
        and config.lora_config is None
        and config.parallel_config.pipeline_parallel_size == 1
        and config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        and backend in _BACKENDS
        and not model.is_hybrid
        and not getattr(model, "return_sampling_mask", False)
        and not getattr(model, "enable_return_routed_experts", False)
    )
