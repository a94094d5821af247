"""Kernels that learn how likely drafts are accepted. ``AT`` is a ``KernelLayout``."""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grade(grades, counters, kind, verified, accepted, drafted, AT: tl.constexpr):
    """Count the drafts of a row that were verified. grades: float32 [KINDS, k, 2]: drafts whose
    predecessors were accepted, and of these the ones that were accepted themselves. drafted: 1 if
    the draft made them, as only those are in the counters, int64."""
    lane = tl.arange(0, AT.token_lanes)
    reached = (lane < verified) & (lane <= accepted)
    taken = reached & (lane < accepted)
    at = grades + (kind * AT.k + lane) * 2
    tl.atomic_add(at, 1.0, mask=reached, sem="relaxed")
    tl.atomic_add(at + 1, 1.0, mask=taken, sem="relaxed")
    tl.atomic_add(
        counters + AT.counter_verified + lane, 1, mask=lane < verified * drafted, sem="relaxed"
    )
    taken = taken & (lane < verified * drafted)
    tl.atomic_add(counters + AT.counter_taken + lane, 1, mask=taken, sem="relaxed")


@triton.jit
def count_supply(supply, depth, AT: tl.constexpr):
    """Count a row that has ``depth`` drafts of its own. supply: float32 [k + 1], such rows with at
    least 0, 1, .. k drafts."""
    lane = tl.arange(0, AT.token_lanes)
    tl.atomic_add(supply, 1.0, sem="relaxed")
    tl.atomic_add(supply + 1 + lane, 1.0, mask=lane < depth, sem="relaxed")


@triton.jit
def survive(acceptance, kind, count, AT: tl.constexpr):
    """float32 [token_lanes]: the chance of each of ``count`` drafts of a kind to be accepted if
    those before it are; 0 beyond. acceptance: float32 [KINDS, k]."""
    lane = tl.arange(0, AT.token_lanes)
    return tl.load(acceptance + kind * AT.k + lane, mask=lane < count, other=0.0)


@triton.jit
def calibrate_kernel(
    grades,  # float32 [cells, 2], as ``grade`` counts them; written: faded
    prior,  # float32 [cells]: acceptance as long as nothing is known
    acceptance,  # float32 [cells], written; first those of branches
    supply,  # float32 [k + 1], as ``count_supply`` counts it; written: faded
    typical,  # float32 [k], written: as ``look_up_kernel`` reads it
    fade,  # what a grade is worth after a step, of what it was worth before
    weight,  # number of drafts that the prior is worth
    K: tl.constexpr,
    CELLS: tl.constexpr,
    LANES: tl.constexpr,  # CELLS rounded up to a power of two
):
    """After a step: forget a little, and derive the chances for the next one."""
    cell = tl.arange(0, LANES)
    there = cell < CELLS
    tried = tl.load(grades + cell * 2, mask=there, other=0.0) * fade
    taken = tl.load(grades + cell * 2 + 1, mask=there, other=0.0) * fade
    tl.store(grades + cell * 2, tried, mask=there)
    tl.store(grades + cell * 2 + 1, taken, mask=there)
    before = tl.load(prior + cell, mask=there, other=0.0)
    chance = (taken + before * weight) / (tried + weight)
    tl.store(acceptance + cell, chance, mask=there)
    fewer = tl.load(supply + cell, mask=cell < K, other=0.0)
    rows = tl.load(supply + 1 + cell, mask=cell < K, other=0.0)
    tl.store(typical + cell, chance * rows / tl.maximum(fewer, 1e-6), mask=cell < K)
    tl.debug_barrier()
    counted = tl.load(supply + cell, mask=cell <= K, other=0.0)
    tl.store(supply + cell, counted * fade, mask=cell <= K)
