"""How kernels load what another process may be writing at the same time.

A reader must see a record's stamp, then its body, then the stamp again. Loads of a GPU may overtake
each other unless one needs the value of the other: each step's loads are therefore masked by what
the step before has read. What the other side writes is only ever loaded, since an atomic operation
on it would not be atomic across the bus; "volatile" is what keeps Triton for NVIDIA from using an
older value, ".cv" what keeps Triton for AMD from it. NVIDIA's assembler refuses both on one load.
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
