"""The backends of the draft's attention: what each needs, and which one is used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from packaging.version import Version

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.platforms.interface import Platform

    from vllm_ssd.draft.attention.base import PagedAttention

TREE_BACKEND_VARIABLE = "SSD_TREE_DECODE_BACKEND"

TreeBackend = Literal["auto", "triton", "flashinfer", "sdpa"]
Backend = Literal["triton", "flashinfer", "sdpa"]


@dataclass(frozen=True)
class BackendInfo:
    """path: module and class, imported when the backend is chosen, because each needs a package
    that the others do without. package: this package. dtypes, head_dims: those that the draft may
    have, as names and numbers; empty = any. power_of_2: heads must have such a size, from 16 to
    256. windows: layers may have sliding windows. least: a distribution that may bring the package,
    and its first version with correct tree masks."""

    path: str
    package: str = "torch"
    needs_gpu: bool = False
    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    power_of_2: bool = False
    windows: bool = True
    least: tuple[str, str] | None = None

    def obstacle(self, draft: ModelConfig | None, platform: Platform) -> str | None:
        """Why this backend cannot be the draft's attention, as the end of a sentence; None if it
        can. draft: None if it is not known yet."""
        if self.needs_gpu and platform.is_cpu():
            return "needs a GPU"
        if importlib.util.find_spec(self.package) is None:
            return "is not installed"
        if (outdated := self._outdated()) is not None:
            return outdated
        if draft is None:
            return None
        head, dtype = head_size(draft), str(draft.dtype).removeprefix("torch.")
        if self.power_of_2 and (not 16 <= head <= 256 or head & (head - 1)):
            return f"needs heads of a power of two up to 256 and the draft's have {head}"
        if self.dtypes and dtype not in self.dtypes:
            return f"needs a 16-bit draft and this one is {dtype}"
        if not self.windows and draft.get_sliding_window() is not None:
            return "cannot do sliding windows, which the draft has"
        if self.head_dims and head not in self.head_dims:
            *most, last = map(str, self.head_dims)
            return f"needs heads of {', '.join(most)} or {last} and the draft's have {head}"
        return None

    def _outdated(self) -> str | None:
        if self.least is None:
            return None
        distribution, least = self.least
        try:
            found = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
        if Version(found) >= Version(least):
            return None
        return f"needs {distribution} {least} or later and this is {found}, whose masks are wrong"


BACKENDS: dict[Backend, BackendInfo] = {
    "triton": BackendInfo("triton:TritonAttention", "triton", needs_gpu=True, power_of_2=True),
    "flashinfer": BackendInfo(
        "flashinfer:FlashInferAttention",
        "flashinfer",
        needs_gpu=True,
        dtypes=("bfloat16", "float16"),
        head_dims=(64, 128, 256),
        windows=False,
        # With grouped queries, 0.5.3+amd.1 reads the mask of another query for three of four.
        least=("amd-flashinfer", "0.5.3+amd.2"),
    ),
    "sdpa": BackendInfo("sdpa:SDPAAttention"),
}

# The order in which "auto" tries them. On ROCm FlashInfer's kernels are AMD's own, and Triton's
# have not been timed.
_ORDER: tuple[Backend, ...] = ("triton", "flashinfer", "sdpa")
_ORDER_ON_ROCM: tuple[Backend, ...] = ("flashinfer", "triton", "sdpa")


def head_size(draft: ModelConfig) -> int:
    """The size of the heads that the draft's attention sees. The draft computes latent attention
    (MLA) as plain attention."""
    if not draft.use_mla:
        return draft.get_head_size()
    config = draft.hf_text_config
    return int(config.qk_nope_head_dim + config.qk_rope_head_dim)


def default_tree_backend() -> TreeBackend:
    """The backend that the environment names, or "auto"; ``ValueError`` if it names no backend."""
    value = os.environ.get(TREE_BACKEND_VARIABLE, "auto")
    for backend in get_args(TreeBackend):
        if value == backend:
            return backend
    raise ValueError(
        f"the environment variable {TREE_BACKEND_VARIABLE} must be one of "
        f"{', '.join(get_args(TreeBackend))}, not {value!r}"
    )


def resolve_tree_backends(
    chosen: TreeBackend, draft: ModelConfig | None, platform: Platform
) -> tuple[Backend, ...]:
    """The backends for a draft on a platform, the preferred one first; ``ValueError`` if the chosen
    one cannot be used. draft: None if it is not known yet."""
    if chosen == "auto":
        order = _ORDER_ON_ROCM if platform.is_rocm() else _ORDER
        return tuple(b for b in order if BACKENDS[b].obstacle(draft, platform) is None)
    obstacle = BACKENDS[chosen].obstacle(draft, platform)
    if obstacle is not None:
        raise refusal(chosen, obstacle)
    return (chosen,)


def refusal(chosen: Backend, obstacle: str) -> ValueError:
    """The error that says why the chosen backend cannot be used."""
    return ValueError(
        f"tree_backend {chosen!r} (an option, or {TREE_BACKEND_VARIABLE}) {obstacle}: "
        "write 'auto' or 'sdpa'"
    )


def load_backend(backend: Backend) -> type[PagedAttention]:
    """The class of a backend."""
    path = f"vllm_ssd.draft.attention.{BACKENDS[backend].path}"
    found: type[PagedAttention] = pkgutil.resolve_name(path)
    return found
