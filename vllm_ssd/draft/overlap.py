"""Kernels that start while the kernel before still runs, on GPUs that can do that.

NVIDIA calls it programmatic dependent launch. From compute capability 9.0 on, a kernel's programs
may take their places on the GPU as soon as all programs of the kernel before have called
``let_next_begin``. Until they call ``wait_for_last``, they may not read what that kernel writes.
They may read what earlier kernels have written, because every kernel waits before it lets the next
one begin. On other GPUs the kernels run one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_LINE = tl.constexpr(128)  # bytes that are fetched at a time


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments to launch such a kernel with: its constant ``OVERLAP``, and Triton's own option."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Wait until all that the kernel before has written can be read."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Let the next kernel take its places. Call this after ``wait_for_last``. A kernel that reads
    much memory calls it late, because it needs the memory until then."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(matrix, rows, width, first, LENGTH: tl.constexpr, OVERLAP: tl.constexpr):
    """Bring rows of a matrix into the L2 cache: LENGTH columns, a power of two, from ``first`` on.
    width: columns of the whole matrix."""
    if OVERLAP:
        step: tl.constexpr = _LINE // (matrix.dtype.element_ty.primitive_bitwidth // 8)
        column = tl.minimum(first + tl.arange(0, LENGTH // step) * step, width - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [matrix + rows[:, None] * width + column[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
