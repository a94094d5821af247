"""Refuses streaming input, prompts in pieces, where vLLM would go on from a wrong state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor


def with_streaming_refused(
    original: Original, self: InputProcessor, *args: Any, resumable: bool = False, **kwargs: Any
) -> Any:
    """With each new piece, vLLM forgets how many draft tokens the last step accepted. Layers with
    states would go on from the state before these, and the text would be wrong."""
    if resumable and uses_ssd(self.vllm_config):
        from vllm_ssd.config.target_checks import refusal
        from vllm_ssd.config.verification import has_states

        if has_states(self.model_config):
            what = "streaming input for targets with state-space or linear layers"
            raise refusal(what, "send each prompt at once")
    return original(self, *args, resumable=resumable, **kwargs)
