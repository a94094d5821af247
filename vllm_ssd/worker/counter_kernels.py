"""Counts waits for the device lookup. ``AT`` is a ``KernelLayout``."""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.table.schema import SHORTEST_WAIT_US

_SHORTEST_WAIT_US = tl.constexpr(SHORTEST_WAIT_US)


@triton.jit
def count_wait(counters, wait_us, AT: tl.constexpr):
    """Count a step's wait by the rules of ``TargetCounters.waited``. A wait of 0 counts nothing."""
    tl.atomic_add(counters + AT.counter_wait_us, wait_us, sem="relaxed")
    lane = tl.arange(0, AT.wait_lanes).to(tl.int64)
    longer = (lane < AT.wait_counters - 1) & (wait_us > (_SHORTEST_WAIT_US << lane))
    place = tl.sum(longer.to(tl.int64))
    tl.atomic_add(counters + AT.counter_waits + place, 1, mask=wait_us > 0, sem="relaxed")
