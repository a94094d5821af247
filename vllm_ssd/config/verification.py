"""Where vLLM's adaptive verification is turned on without being asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Attention that can verify rows whose lengths only the GPU knows. None: vLLM chooses one.
_BACKENDS = {None, "FLASH_ATTN", "TRITON_ATTN", "ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN"}


def choose_verification(config: VllmConfig) -> None:
    """Set ``enable_adaptive_verification`` of a complete config with ssd, if it was not given.

    It is vLLM that verifies: these are its own conditions, which it would refuse with an error.
    Source: ``VllmConfig._validate_adaptive_verification`` of vLLM 0.33."""
    speculation: Any = config.speculative_config
    if speculation.enable_adaptive_verification is None:
        speculation.enable_adaptive_verification = _is_possible(config)


def _is_possible(config: VllmConfig) -> bool:
    if not config.use_v2_model_runner:
        return False
    backend = getattr(config.attention_config.backend, "name", None)
    model: Any = config.model_config
    return bool(
        config.lora_config is None
        and config.parallel_config.pipeline_parallel_size == 1
        and config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        and backend in _BACKENDS
        and not model.is_hybrid
        and not getattr(model, "return_sampling_mask", False)
        and not getattr(model, "enable_return_routed_experts", False)
    )
