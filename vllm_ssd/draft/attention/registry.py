"""The backends of the draft's attention: which there are, what each needs, which one is used."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.platforms.interface import Platform

    from vllm_ssd.draft.attention.base import PagedAttention

TREE_BACKEND_VARIABLE = "SSD_TREE_DECODE_BACKEND"

TreeBackend = Literal["auto", "triton", "flashinfer", "sdpa"]
Backend = Literal["triton", "flashinfer", "sdpa"]


@dataclass(frozen=True)
class BackendInfo:
    """path: module and class, imported when it is chosen, as each needs a package that the others
    do without. package: that one. dtypes, head_dims: the draft's, as names and numbers; empty =
    any. power_of_2: whether heads must have such a size. windows: whether layers may have sliding
    windows."""

    path: str
    package: str = "torch"
    needs_gpu: bool = False
    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    power_of_2: bool = False
    windows: bool = True

    def obstacle(self, draft: ModelConfig | None, platform: Platform) -> str | None:
        """Why this cannot be the draft's attention, as the end of a sentence; None if it can.
        draft: None if it is not known yet."""
        if self.needs_gpu and platform.is_cpu():
            return "needs a GPU"
        if importlib.util.find_spec(self.package) is None:
            return "is not installed"
        if draft is None:
            return None
        head, dtype = draft.get_head_size(), str(draft.dtype).removeprefix("torch.")
        if self.power_of_2 and (head < 16 or head & (head - 1)):
            return f"needs heads of a power of two and the draft's have {head}"
        if self.dtypes and dtype not in self.dtypes:
            return f"needs a 16-bit draft and this one is {dtype}"
        if not self.windows and draft.get_sliding_window() is not None:
            return "cannot do sliding windows, which the draft has"
        if self.head_dims and head not in self.head_dims:
            *most, last = map(str, self.head_dims)
            return f"needs heads of {', '.join(most)} or {last} and the draft's have {head}"
        return None


# In the order in which "auto" tries them.
BACKENDS: dict[Backend, BackendInfo] = {
    "triton": BackendInfo("triton.TritonAttention", "triton", needs_gpu=True, power_of_2=True),
    "flashinfer": BackendInfo(
        "flashinfer.FlashInferAttention",
        "flashinfer",
        needs_gpu=True,
        dtypes=("bfloat16", "float16"),
        head_dims=(64, 128, 256),
        windows=False,
    ),
    "sdpa": BackendInfo("sdpa.SDPAAttention"),
}


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
    """The backend for a draft on a platform; ``ValueError`` if the chosen one cannot be used.
    draft: None if it is not known yet."""
    if chosen == "auto":
        return next(b for b, info in BACKENDS.items() if info.obstacle(draft, platform) is None)
    obstacle = BACKENDS[chosen].obstacle(draft, platform)
    if obstacle is not None:
        raise ValueError(
            f"tree_backend {chosen!r} (an option, or {TREE_BACKEND_VARIABLE}) {obstacle}: "
            "write 'auto' or 'sdpa'"
        )
    return chosen


def load_backend(backend: Backend) -> type[PagedAttention]:
    """The class of a backend."""
    module, _, name = BACKENDS[backend].path.partition(".")
    found: type[PagedAttention] = getattr(
        importlib.import_module(f"vllm_ssd.draft.attention.{module}"), name
    )
    return found
