"""Device functions for the distributions that drafts were sampled from, in the format of
``draft_probs.py``. ``AT`` is a ``KernelLayout``."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.table.draft_probs import ONE, TOLERANCE
from vllm_ssd.table.kernel_access import read_where

_ONE = tl.constexpr(ONE)
_TOLERANCE = tl.constexpr(TOLERANCE)


@triton.jit
def read_probs(draft_probs, depth, AT: tl.constexpr):
    """Load the first ``depth`` drafts' entries from the table: int64 [token_lanes, prob_lanes]."""
    step, rank = tl.arange(0, AT.token_lanes)[:, None], tl.arange(0, AT.prob_lanes)[None, :]
    return read_where(draft_probs + step * AT.top_m + rank, (step < depth) & (rank < AT.top_m))


@triton.jit
def are_sound(tokens, draft_probs, depth, VOCAB: tl.constexpr, AT: tl.constexpr):
    """True if the first ``depth`` tokens can have been sampled from ``draft_probs``. tokens: int32
    [token_lanes]; draft_probs: int64 [token_lanes, prob_lanes], which ``read_probs`` returns."""
    step = tl.arange(0, AT.token_lanes)
    token = draft_probs.to(tl.int32)
    probability = (draft_probs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    known = (token >= 0) & (token < VOCAB) & (probability >= 0)
    sound = tl.min(tl.where(known, 1, 0), axis=1)
    sound = sound & (tl.abs(tl.sum(probability, axis=1) - 1) <= _TOLERANCE)
    sound = sound & tl.max(tl.where((token == tokens[:, None]) & (probability > 0), 1, 0), axis=1)
    return tl.min(tl.where(step < depth, sound, 1)) == 1


@triton.jit
def store_probs(out, draft_probs, depth, AT: tl.constexpr):
    """Write the first ``depth`` drafts' entries to the pointer ``out``, int64 [k, top_m]."""
    step, rank = tl.arange(0, AT.token_lanes)[:, None], tl.arange(0, AT.prob_lanes)[None, :]
    tl.store(out + step * AT.top_m + rank, draft_probs, mask=(step < depth) & (rank < AT.top_m))


@triton.jit
def move_probs(out, source, depth, AT: tl.constexpr):
    """Copy the first ``depth`` drafts' entries between two pointers to int64 [k, top_m]. Neither of
    them may point into the table."""
    step, rank = tl.arange(0, AT.token_lanes)[:, None], tl.arange(0, AT.prob_lanes)[None, :]
    whole = (step < depth) & (rank < AT.top_m)
    store_probs(out, tl.load(source + step * AT.top_m + rank, mask=whole, other=0), depth, AT)


@triton.jit
def store_certain(out, tokens, start, AT: tl.constexpr):
    """Write entries that propose tokens with certainty, from index ``start`` on. out: pointer to
    int64 [k, top_m]; tokens: int32 [token_lanes]."""
    if AT.top_m > 0:
        step, rank = tl.arange(0, AT.token_lanes)[:, None], tl.arange(0, AT.prob_lanes)[None, :]
        tl.store(
            out + step * AT.top_m + rank,
            (tokens[:, None] + 0 * rank).to(tl.int64) | _ONE,
            mask=(step >= start) & (step < AT.k) & (rank < AT.top_m),
        )
