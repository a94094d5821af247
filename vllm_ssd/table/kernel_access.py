"""How kernels load what another process may be writing at the same time.

A reader must load a record's stamp, then its body, then the stamp again. A GPU may reorder loads
unless one needs the value of the other, so each step masks its loads by what the step before has
read. Kernels only load what the other side writes: an atomic operation on it would not be atomic
across the bus.

On NVIDIA GPUs "volatile" keeps Triton from using an older value; the assembler refuses ".cv" with
it. AMD GPUs need both. ".cv" sends loads past the caches, but the compiler may still merge loads or
move them out of a loop. "volatile" forbids that, but Triton drops it from loads of a block and
keeps it only on loads of one value. So every loop that looks at the table must load one value of it
on its own. The compiler moves no other load past that one (``tests/unit/test_kernels_for_amd.py``).
A GPU waits for each such value before it goes on, so kernels read all else as blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip


@triton.jit
def read(at):
    """The value at a pointer, or at a block of pointers, past all caches."""
    if is_hip():
        value = tl.load(at, volatile=True, cache_modifier=".cv")
    else:
        value = tl.load(at, volatile=True)
    return value


@triton.jit
def read_where(at, mask):
    """The values at a block of pointers, past all caches; 0 where the mask is false."""
    if is_hip():
        value = tl.load(at, mask=mask, other=0, volatile=True, cache_modifier=".cv")
    else:
        value = tl.load(at, mask=mask, other=0, volatile=True)
    return value


@triton.jit
def value_in(block, index):
    """The value in one lane of a block."""
    lane = tl.arange(0, block.shape[0])
    return tl.sum(tl.where(lane == index, block, 0))
