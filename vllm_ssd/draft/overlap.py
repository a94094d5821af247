"""Kernels that start while the one before still runs, where a GPU can do that.

NVIDIA calls it programmatic dependent launch: from compute capability 9.0 on, the programs of a
kernel may take their places on the GPU as soon as those of the kernel before have all called
``let_next_begin``. Until they call ``wait_for_last`` they may not read what that kernel writes.
What the kernels before it have written they may read, as every kernel waits before it lets the next
one begin. Everywhere else the kernels run one after the other.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_LINE = tl.constexpr(128)  # bytes that are fetched at a time


def launch_options(device: torch.device) -> dict[str, Any]:
    """What to launch such a kernel with: ``OVERLAP``, its constant, and Triton's own option."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {"OVERLAP": False}
    if torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Wait until all that the kernel before has written can be read."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """The next kernel may take its places. To be said after ``wait_for_last``, and by a kernel that
    reads much memory late: until then it needs it."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(matrix, rows, width, first, LENGTH: tl.constexpr, OVERLAP: tl.constexpr):
    """Have rows of a matrix brought into the L2 cache: LENGTH columns, a power of two, from
    ``first`` on. width: of the whole matrix."""
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
