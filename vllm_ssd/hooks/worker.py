"""Prepares the workers of an engine with ssd."""

from __future__ import annotations

from typing import Any

from vllm_ssd.hooks.engine_args import uses_ssd
from vllm_ssd.hooks.patches import Original, Where, apply


def with_ssd(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Patch the model runner of a worker before it is made, and let trainers change the draft's
    weights. ``RuntimeError`` if vLLM is not supported."""
    original(self, *args, **kwargs)
    if not uses_ssd(self.vllm_config):
        return
    from vllm.platforms import current_platform

    from vllm_ssd.hooks.reload import let_reload

    is_v2 = self.vllm_config.use_v2_model_runner
    apply(Where.WORKER_V2 if is_v2 else Where.WORKER_V1)
    if current_platform.is_cpu():
        apply(Where.WORKER_ON_CPU)
    let_reload(self)
