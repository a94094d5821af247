"""What the device lookup counts of waits and of requests. ``AT`` is a ``KernelLayout``."""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.table.kernel_access import value_in
from vllm_ssd.table.schema import SHORTEST_WAIT_US

# Columns of the tallies, int64 [slots, TALLY_FIELDS]: the record of each slot's request, as in
# ``TableShape.request_dtype``, and in the last column which of the slot's two records that is. The
# device counts there, and the table gets copies: it would be slow to read.
TALLY_FIELDS = 8
_TALLY_FIELDS = tl.constexpr(TALLY_FIELDS)
_TURN = tl.constexpr(TALLY_FIELDS - 1)
_SHORTEST_WAIT_US = tl.constexpr(SHORTEST_WAIT_US)


@triton.jit
def count_wait(counters, wait_us, AT: tl.constexpr):
    """``TargetCounters.waited`` of a step; nothing for a step that did not wait."""
    tl.atomic_add(counters + AT.counter_wait_us, wait_us, sem="relaxed")
    lane = tl.arange(0, AT.wait_lanes).to(tl.int64)
    longer = (lane < AT.wait_counters - 1) & (wait_us > (_SHORTEST_WAIT_US << lane))
    place = tl.sum(longer.to(tl.int64))
    tl.atomic_add(counters + AT.counter_waits + place, 1, mask=wait_us > 0, sem="relaxed")


@triton.jit
def count_request(stamps, tallies, slot, key, result, wait_us, AT: tl.constexpr):
    """``RequestCounters.count``. result: the place of the round's counter among the target's."""
    lane = tl.arange(0, _TALLY_FIELDS)
    tally_at = tallies + slot * _TALLY_FIELDS + lane
    tally = tl.load(tally_at)
    goes_on = value_in(tally, AT.request_key) == key
    turn = value_in(tally, _TURN)
    turn = tl.where(goes_on, turn, 1 - turn)
    tally = tl.where(goes_on, tally, 0)
    tally += (lane == result).to(tl.int64)
    tally += tl.where(lane == AT.request_wait_us, wait_us, 0)
    tally = tl.where(lane == AT.request_key, key, tally)
    tally = tl.where(lane == _TURN, turn, tally)
    tl.store(tally_at, tally)
    record = AT.requests + (slot * 2 + turn) * AT.request_size
    tl.store(stamps + record + lane, tally, mask=lane < AT.request_size)
