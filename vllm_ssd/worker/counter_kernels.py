"""What the device lookup counts of waits and of requests. ``AT`` is a ``KernelLayout``."""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.protocol.kernel_access import value_in
from vllm_ssd.protocol.schema import SHORTEST_WAIT_US

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
def count_round(stamps, tallies, slot, key, result, verified, accepted, AT: tl.constexpr):
    """``RequestCounters.verified`` and, of a round that has not waited yet, ``count``. verified: of
    the draft's tokens; result: the place of the round's counter among the target's. Returns where
    the request's record is, and the microseconds that it has waited so far.

    tallies: int64 [slots, tally_lanes], the record of each slot's request, and in the last column
    which of the slot's two records that is. Here the device counts, as the table, which gets the
    same, would be slow to read. vLLM hears of the step's tokens while the step waits, so what was
    verified is there before.
    """
    lane = tl.arange(0, AT.tally_lanes)
    turn_at = AT.tally_lanes - 1
    tally_at = tallies + slot * AT.tally_lanes + lane
    tally = tl.load(tally_at)
    goes_on = value_in(tally, AT.request_key) == key
    turn = value_in(tally, turn_at)
    turn = tl.where(goes_on, turn, 1 - turn)
    tally = tl.where(goes_on, tally, 0)
    tally += (lane == result).to(tl.int64)
    of_ring = (lane >= AT.request_verified) & (lane < AT.request_size)
    number = (tl.max(tl.where(of_ring, tally, 0)) >> 32) + 1  # the newest one's is the largest
    place = AT.request_verified + number % AT.verifications
    entry = (number << 32) | (verified << 16) | tl.minimum(accepted, verified)
    tally = tl.where((lane == place) & (verified > 0), entry, tally)
    tally = tl.where(lane == AT.request_key, key, tally)
    tally = tl.where(lane == turn_at, turn, tally)
    is_final = lane != AT.request_wait_us
    tl.store(tally_at, tally, mask=is_final)
    record = AT.requests + (slot * 2 + turn) * AT.request_size
    tl.store(stamps + record + lane, tally, mask=is_final & (lane < AT.request_size))
    return record, value_in(tally, AT.request_wait_us)


@triton.jit
def count_waited(stamps, tallies, slot, record, waited_us, AT: tl.constexpr):
    """The rest of ``count_round``. waited_us: with the round's own wait."""
    tl.store(tallies + slot * AT.tally_lanes + AT.request_wait_us, waited_us)
    tl.store(stamps + record + AT.request_wait_us, waited_us)
