"""Kernels that count waits and requests for the device lookup. ``AT`` is a ``KernelLayout``."""

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
    """Count a step's wait by the rules of ``TargetCounters.waited``. A wait of 0 counts nothing."""
    tl.atomic_add(counters + AT.counter_wait_us, wait_us, sem="relaxed")
    lane = tl.arange(0, AT.wait_lanes).to(tl.int64)
    longer = (lane < AT.wait_counters - 1) & (wait_us > (_SHORTEST_WAIT_US << lane))
    place = tl.sum(longer.to(tl.int64))
    tl.atomic_add(counters + AT.counter_waits + place, 1, mask=wait_us > 0, sem="relaxed")


@triton.jit
def count_round(stamps, tallies, slot, key, result, verified, accepted, AT: tl.constexpr):
    """Count a request's verification and its round before the wait, by the rules of
    ``RequestCounters``. verified: the draft's tokens verified. result: place of the round's counter
    among the target's. Returns the place of the request's record, and the microseconds that the
    request has waited so far.

    tallies: int64 [slots, tally_lanes], the record of each slot's request; the last column says
    which of the slot's two records it is. The device counts in the tallies and copies them to the
    table, which is slow to read. vLLM receives the step's tokens while the step waits, so the
    verification is counted before the wait.
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
    place = AT.request_accepted + tl.minimum(accepted, verified)
    tally += ((lane == place) & (verified > 0)).to(tl.int64)
    tally += tl.where(lane == AT.request_verified, verified, 0)
    tally = tl.where(lane == AT.request_key, key, tally)
    tally = tl.where(lane == turn_at, turn, tally)
    is_final = lane != AT.request_wait_us
    tl.store(tally_at, tally, mask=is_final)
    record = AT.requests + (slot * 2 + turn) * AT.request_size
    tl.store(stamps + record + lane, tally, mask=is_final & (lane < AT.request_size))
    return record, value_in(tally, AT.request_wait_us)


@triton.jit
def count_waited(stamps, tallies, slot, record, waited_us, AT: tl.constexpr):
    """Complete ``count_round`` after the wait. waited_us: microseconds, this round's included."""
    tl.store(tallies + slot * AT.tally_lanes + AT.request_wait_us, waited_us)
    tl.store(stamps + record + AT.request_wait_us, waited_us)
