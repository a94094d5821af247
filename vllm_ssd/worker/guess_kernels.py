"""Device functions for ``guess.py``. ``AT`` is a ``KernelLayout``."""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.worker.guess import LONGEST, REACH

_LONGEST = tl.constexpr(LONGEST)
_REACH = tl.constexpr(REACH)
_PLACES = tl.constexpr(512)  # positions an iteration compares


@triton.jit
def in_vocabulary(tokens, VOCAB: tl.constexpr):
    """``guess.in_vocabulary`` of a token or of a block of them."""
    return tl.where((tokens >= 0) & (tokens < VOCAB), tokens, 0)


@triton.jit
def continuation(text, length, VOCAB: tl.constexpr, AT: tl.constexpr):
    """int32 [token_lanes]: ``guess.continuation`` of a text, int32 [length >= 1]."""
    end = length - 1
    best = end * 0  # the largest of all positions' matching tokens << 32 | place + 1
    lane = tl.arange(0, _PLACES)
    for start in range(tl.maximum(end - _REACH, 0), end, _PLACES):
        place = start + lane
        same = place < end
        matched = tl.zeros([_PLACES], tl.int64)
        for back in tl.static_range(_LONGEST):
            same = same & (place >= back)
            token = tl.load(text + place - back, mask=same, other=0)
            wanted = tl.load(text + end - back, mask=end >= back, other=0)
            same = same & (token == wanted)
            matched += same.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(matched > 0, (matched << 32) | (place + 1), 0)))
    follows = best & 0xFFFFFFFF
    period = tl.where(best > 0, end + 1 - follows, 1)
    source = tl.where(best > 0, follows, end) + tl.arange(0, AT.token_lanes) % period
    return in_vocabulary(tl.load(text + source), VOCAB)
