"""Kernels that measure how likely draft tokens are accepted. ``AT`` is a ``KernelLayout``."""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of a round's draft tokens, by their source. The target accepts another share of each kind.
# FROM_BRANCH: the outcome was predicted. FROM_FALLBACK: drafted once the outcome was known.
# LEFT_OVER: drafted for an earlier round, which had more draft tokens than were verified. GUESSED:
# copied from the text (``guess_kernels.py``).
KINDS = 4
FROM_BRANCH, FROM_FALLBACK, LEFT_OVER, GUESSED = (tl.constexpr(kind) for kind in range(KINDS))
_MOST = tl.constexpr(0.9999)  # greatest chance of a draft token


@triton.jit
def grade(grades, doubts, counters, kind, verified, accepted, drafted, top_probs, AT: tl.constexpr):
    """Count the verified draft tokens of a row. grades: float32 [KINDS, k, 2]: tokens whose
    predecessors were accepted, and those of them that were accepted too. doubts: float32 [3]: of
    such tokens with a known top probability p the sum of 1 - p, and the rejected ones. counters:
    int64. drafted: int64, 1 if the draft made the tokens; the counters count only these. top_probs:
    float32 [token_lanes]."""
    lane = tl.arange(0, AT.token_lanes)
    reached = (lane < verified) & (lane <= accepted)
    taken = reached & (lane < accepted)
    at = grades + (kind * AT.k + lane) * 2
    tl.atomic_add(at, 1.0, mask=reached, sem="relaxed")
    tl.atomic_add(at + 1, 1.0, mask=taken, sem="relaxed")
    tl.atomic_add(
        counters + AT.counter_verified + lane, 1, mask=lane < verified * drafted, sem="relaxed"
    )
    known = reached & (lane < verified * drafted) & is_known(top_probs)
    tl.atomic_add(doubts, tl.sum(tl.where(known, 1 - top_probs, 0.0)), sem="relaxed")
    rejected = tl.sum((known & (taken == 0)).to(tl.float32))
    tl.atomic_add(doubts + 1, rejected, sem="relaxed")
    taken = taken & (lane < verified * drafted)
    tl.atomic_add(counters + AT.counter_taken + lane, 1, mask=taken, sem="relaxed")


@triton.jit
def is_known(top_probs):
    """True for each top probability that is known: neither nan nor damaged."""
    return (top_probs > 0) & (top_probs <= 1)


@triton.jit
def count_supply(supply, depth, AT: tl.constexpr):
    """Count a row with ``depth`` draft tokens of its own. supply: float32 [k + 1], numbers of such
    rows with at least 0, 1, .. k draft tokens."""
    lane = tl.arange(0, AT.token_lanes)
    tl.atomic_add(supply, 1.0, sem="relaxed")
    tl.atomic_add(supply + 1 + lane, 1.0, mask=lane < depth, sem="relaxed")


@triton.jit
def weigh(
    acceptance,
    doubts,
    typical,
    supply,
    kind,
    depth,
    top_probs,
    most_drafts,
    expects_drafts,
    AT: tl.constexpr,
):
    """Return the chances of a row's draft tokens, and of those of its next rounds, both float32
    [token_lanes]: the chance of each to be there and accepted if those before it are.

    No chance is 1. So each token of a row is worth less than the one before it, and whether vLLM
    verifies a token never depends on this token or on later ones.

    A row that uses up left-over tokens has few because few were verified. To expect as few next
    time would keep it so, so it is expected to have what rows usually have.
    """
    lane = tl.arange(0, AT.token_lanes)
    there = lane < tl.minimum(tl.where(kind == GUESSED, AT.k, depth), most_drafts)
    of_kind = tl.load(acceptance + kind * AT.k + lane, mask=there, other=0.0)
    chance = tl.minimum(tl.maximum(1 - tl.load(doubts + 2) * (1 - top_probs), 0.0), _MOST)
    known = there & (kind != GUESSED) & is_known(top_probs)
    if kind != LEFT_OVER:
        count_supply(supply, depth, AT)
    # A branch of k draft tokens if every row is expected to have one, else what rows usually have.
    most = lane < tl.minimum(AT.k, most_drafts)
    all_drafts = tl.load(acceptance + FROM_BRANCH * AT.k + lane, mask=most, other=0.0)
    usual = tl.load(typical + lane, mask=most, other=0.0)
    usual = tl.where(expects_drafts != 0, all_drafts, usual)
    lacking = (kind == LEFT_OVER) | ((kind == GUESSED) & (expects_drafts != 0))
    return tl.where(known, chance, of_kind), tl.where(lacking, usual, of_kind)


@triton.jit
def calibrate_kernel(
    grades,  # float32 [cells, 2], as ``grade`` counts them; written: faded
    prior,  # float32 [cells]: acceptance while nothing is known
    acceptance,  # float32 [cells], written; first those of branches
    doubts,  # float32 [3], as ``grade`` counts them; written: faded, and last the rejected share
    supply,  # float32 [k + 1], as ``count_supply`` counts it; written: faded
    typical,  # float32 [k], written: as ``look_up_kernel`` reads it
    fade,  # factor of a grade's weight per step
    weight,  # weight of the prior, in draft tokens
    over_doubt,  # rejected share of the doubts while nothing is known
    K: tl.constexpr,
    CELLS: tl.constexpr,
    LANES: tl.constexpr,  # CELLS rounded up to a power of two
):
    """Fade the counts after a step, and derive the chances for the next one."""
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
    doubted, rejected = tl.load(doubts) * fade, tl.load(doubts + 1) * fade
    tl.store(doubts, doubted)
    tl.store(doubts + 1, rejected)
    tl.store(doubts + 2, (rejected + over_doubt * weight) / (doubted + weight))
    tl.debug_barrier()
    counted = tl.load(supply + cell, mask=cell <= K, other=0.0)
    tl.store(supply + cell, counted * fade, mask=cell <= K)
