"""Kernels that measure how likely draft tokens are accepted. ``AT`` is a ``KernelLayout``."""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of a round's draft tokens. DRAFTED: the draft made them for this round. LEFT_OVER: it made
# them for an earlier round, which had more draft tokens than were verified. GUESSED: copied from
# the text (``guess_kernels.py``).
DRAFTED, LEFT_OVER, GUESSED = (tl.constexpr(kind) for kind in range(3))
# Sources whose doubts are counted apart: the draft, the first token of a guess, its other tokens.
SOURCES = 3
_MOST = tl.constexpr(0.9999)  # greatest chance of a draft token


@triton.jit
def doubts_of(kind, top_probs, AT: tl.constexpr):
    """Return the source of each draft token of a row, int32 [token_lanes], and the doubt about it,
    float32 [token_lanes]: 1 less the draft's largest probability at its place, 1 if that is not
    known."""
    lane = tl.arange(0, AT.token_lanes)
    source = tl.where(kind == GUESSED, tl.minimum(lane, 1) + 1, 0)
    known = (top_probs > 0) & (top_probs <= 1)
    return source, tl.where(known & (source == 0), 1 - top_probs, 1.0)


@triton.jit
def grade(doubts, counters, kind, verified, accepted, drafted, top_probs, AT: tl.constexpr):
    """Count the verified draft tokens of a row whose predecessors were accepted. doubts: float32
    [SOURCES, 2], the sum of the doubts about them, and the number of rejected ones. counters:
    int64. drafted: int64, 1 if the draft made the tokens; the counters count only these. top_probs:
    float32 [token_lanes]."""
    lane = tl.arange(0, AT.token_lanes)
    reached = (lane < verified) & (lane <= accepted)
    taken = lane < tl.minimum(accepted, verified)
    source, doubt = doubts_of(kind, top_probs, AT)
    at = doubts + source * 2
    tl.atomic_add(at, doubt, mask=reached, sem="relaxed")
    tl.atomic_add(at + 1, 1.0, mask=reached & (lane >= accepted), sem="relaxed")
    own = lane < verified * drafted
    tl.atomic_add(counters + AT.counter_verified + lane, 1, mask=own, sem="relaxed")
    tl.atomic_add(counters + AT.counter_taken + lane, 1, mask=own & taken, sem="relaxed")


@triton.jit
def count_supply(supply, depth, AT: tl.constexpr):
    """Count a row with ``depth`` draft tokens of its own. supply: float32 [k + 1], numbers of such
    rows with at least 0, 1, .. k draft tokens."""
    lane = tl.arange(0, AT.token_lanes)
    tl.atomic_add(supply, 1.0, sem="relaxed")
    tl.atomic_add(supply + 1 + lane, 1.0, mask=lane < depth, sem="relaxed")


@triton.jit
def weigh(
    shares,
    first,
    usual,
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

    No chance is 1. So each token of a row is worth less than the one before it, or both are worth
    nothing. So whether vLLM verifies a token never depends on this token or on later ones. Nor do
    the chances of the next rounds depend on drawn tokens: a first token's place follows from the
    text.

    A row that uses up left-over tokens has few because few were verified. To expect as few next
    time would keep it so, so it is expected to have what rows usually have.
    """
    lane = tl.arange(0, AT.token_lanes)
    there = lane < tl.minimum(tl.where(kind == GUESSED, AT.k, depth), most_drafts)
    source, doubt = doubts_of(kind, top_probs, AT)
    chance = tl.minimum(tl.maximum(1 - tl.load(shares + source) * doubt, 0.0), _MOST)
    current = tl.where(there, chance, 0.0)
    if kind != LEFT_OVER:
        count_supply(supply, depth, AT)
    begins = (lane == 0) & (lane < tl.where(kind == DRAFTED, depth, 0))
    tl.atomic_add(first + lane, chance, mask=begins, sem="relaxed")
    tl.atomic_add(first + 1 + lane, 1.0, mask=begins, sem="relaxed")
    mean = tl.load(usual)
    drafted = tl.where(there & (kind == DRAFTED), mean, current)
    # A branch of k draft tokens if every row is expected to have one, else what rows usually have.
    most = lane < tl.minimum(AT.k, most_drafts)
    typical = tl.where(expects_drafts != 0, mean, tl.load(usual + 1 + lane, mask=most, other=0.0))
    lacking = (kind == LEFT_OVER) | ((kind == GUESSED) & (expects_drafts != 0))
    return current, tl.where(lacking, tl.where(most, typical, 0.0), drafted)


@triton.jit
def calibrate_kernel(
    doubts,  # float32 [SOURCES, 2], as ``grade`` counts them; written: faded
    prior,  # float32 [SOURCES]: rejected share of the doubts while nothing is known
    shares,  # float32 [SOURCES], written: rejected share of the doubts
    first,  # float32 [2]: chances of rows' first draft tokens, and their number; written: faded
    supply,  # float32 [k + 1], as ``count_supply`` counts it; written: faded
    usual,  # float32 [k + 1], written: as ``look_up_kernel`` reads it
    fade,  # factor of a count's weight per step
    weight,  # weight of what is assumed at first, in doubts and in first draft tokens
    accepted,  # chance of a first draft token while nothing is known
    SOURCES: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,  # at least k + 1 and SOURCES, a power of two
):
    """Fade the counts after a step, and derive the chances for the next one."""
    lane = tl.arange(0, LANES)
    of_source = lane < SOURCES
    doubted = tl.load(doubts + lane * 2, mask=of_source, other=0.0) * fade
    rejected = tl.load(doubts + lane * 2 + 1, mask=of_source, other=0.0) * fade
    tl.store(doubts + lane * 2, doubted, mask=of_source)
    tl.store(doubts + lane * 2 + 1, rejected, mask=of_source)
    assumed = tl.load(prior + lane, mask=of_source, other=0.0) * weight
    tl.store(shares + lane, (rejected + assumed) / (doubted + weight), mask=of_source)
    chances, rows = tl.load(first) * fade, tl.load(first + 1) * fade
    tl.store(first, chances)
    tl.store(first + 1, rows)
    mean = (chances + accepted * weight) / (rows + weight)
    fewer = tl.load(supply + lane, mask=lane < K, other=0.0)
    with_token = tl.load(supply + 1 + lane, mask=lane < K, other=0.0)
    tl.store(usual, mean)
    tl.store(usual + 1 + lane, mean * with_token / tl.maximum(fewer, 1e-6), mask=lane < K)
    tl.debug_barrier()
    counted = tl.load(supply + lane, mask=lane <= K, other=0.0)
    tl.store(supply + lane, counted * fade, mask=lane <= K)
