"""Guessed tokens for a row without drafts, by prompt lookup. ``AT`` is a ``KernelLayout``.

The request's own text is continued as it went on after the position that is most like its end. It
costs nothing, as Model Runner V2 verifies k tokens of every row, and is right where a text repeats
itself. The draft is not told: its branches are all for accepted length 0, the likeliest.
``tests/support/guess.py`` says the same in numpy.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

LONGEST = 4  # tokens at the end of the text that are compared
REACH = 8192  # tokens before the end that are searched

_LONGEST = tl.constexpr(LONGEST)
_REACH = tl.constexpr(REACH)
_PLACES = tl.constexpr(512)  # positions an iteration compares


@triton.jit
def in_vocabulary(tokens, VOCAB: tl.constexpr):
    """A token, or a block of them, with 0 for those that no model can produce: a multimodal prompt
    has placeholders with ids outside the vocabulary."""
    return tl.where((tokens >= 0) & (tokens < VOCAB), tokens, 0)


@triton.jit
def continuation(text, length, VOCAB: tl.constexpr, AT: tl.constexpr):
    """int32 [token_lanes] after a text, int32 [length >= 1]; all of them ``in_vocabulary``. Of the
    positions whose last tokens equal those of the text, the longest match counts, then the latest.
    Its continuation repeats beyond the text's end; without a match the newest token repeats."""
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
