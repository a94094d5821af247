"""How kernels load what another process may be writing at the same time.

A reader must see a record's stamp, then its body, then the stamp again. Loads of a GPU may overtake
each other unless one needs the value of the other: each step's loads are therefore masked by what
the step before has read. What the other side writes is only ever loaded, since an atomic operation
on it would not be atomic across the bus.

"volatile" is what keeps Triton for NVIDIA from using an older value; its assembler refuses ".cv"
beside it. On AMD both are needed. ".cv" sends loads past the caches, but says nothing to the
compiler, which may merge loads or move them out of a loop. "volatile" forbids it that, but Triton
drops it where a load is of a block, and keeps it where a load is of one value. So every loop that
looks at the table must read one value of it on its own, past which the other loads are not moved
(``tests/unit/test_kernels_for_amd.py``). A GPU waits for each such value before it goes on: all
else that can be read together is read as a block.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

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
    """As ``read``, but 0 where the mask is false."""
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
