"""Which attention the draft's trees get."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Literal, get_args

from vllm_ssd.draft.attention.flashinfer import DTYPES, HEAD_DIMS

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.platforms.interface import Platform

TREE_BACKEND_VARIABLE = "SSD_TREE_DECODE_BACKEND"

TreeBackend = Literal["auto", "triton", "flashinfer", "sdpa"]
Backend = Literal["triton", "flashinfer", "sdpa"]
_ON_GPUS: tuple[Literal["triton", "flashinfer"], ...] = ("triton", "flashinfer")


def default_tree_backend() -> TreeBackend:
    """What the environment says, or "auto"; ``ValueError`` if it names no backend."""
    value = os.environ.get(TREE_BACKEND_VARIABLE, "auto")
    for backend in get_args(TreeBackend):
        if value == backend:
            return backend
    raise ValueError(
        f"the environment variable {TREE_BACKEND_VARIABLE} must be one of "
        f"{', '.join(get_args(TreeBackend))}, not {value!r}"
    )


def resolve_tree_backend(
    chosen: TreeBackend, draft: ModelConfig | None, platform: Platform
) -> Backend:
    """The attention of a draft, if it is known yet, on a platform. Raises ``ValueError`` if what
    was chosen will not do."""
    for backend in _ON_GPUS:
        obstacle = _obstacle(backend, draft, platform)
        if chosen == backend and obstacle:
            raise ValueError(
                f"tree_backend {backend!r} (an option, or {TREE_BACKEND_VARIABLE}) {obstacle}: "
                "write 'auto' or 'sdpa'"
            )
        if chosen in ("auto", backend) and not obstacle:
            return backend
    return "sdpa"


def _obstacle(backend: str, draft: ModelConfig | None, platform: Platform) -> str | None:
    """Why this cannot be the draft's attention, as the end of a sentence."""
    if platform.is_cpu():
        return "needs a GPU"
    if importlib.util.find_spec(backend) is None:
        return "is not installed"
    if draft is None:
        return None
    head = draft.get_head_size()
    if backend == "triton":
        two = head >= 16 and head & (head - 1) == 0
        return None if two else f"needs heads of a power of two and the draft's have {head}"
    if draft.dtype not in DTYPES:
        return f"needs a 16-bit draft and this one is {str(draft.dtype).removeprefix('torch.')}"
    if head not in HEAD_DIMS:
        return f"needs heads of 64, 128 or 256 and the draft's have {head}"
    return None
