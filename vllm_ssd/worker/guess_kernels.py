"""Guesses tokens for a row without draft tokens, by prompt lookup. ``AT`` is a ``KernelLayout``.

A guess copies the tokens after the earlier position that is most like the end of the request's
text. It costs nothing, because Model Runner V2 verifies k tokens of every row. It is right where a
text repeats itself. The draft is not told of it, so all its branches are for accepted length 0, the
likeliest. ``tests/support/guess.py`` guesses by the same rules, with a plain search.
"""

from __future__ import annotations

import triton
import triton.language as tl

LONGEST = 4  # tokens at the end of the text that are compared
REACH = 8192  # tokens before the end that are searched

_LONGEST = tl.constexpr(LONGEST)
_REACH = tl.constexpr(REACH)
_PLACES = tl.constexpr(512)  # positions compared per iteration


@triton.jit
def in_vocabulary(tokens, VOCAB: tl.constexpr):
    """Return one token or a block of them, with 0 in place of ids outside the vocabulary.
    Placeholders in multimodal prompts have such ids, and no model can produce them."""
    return tl.where((tokens >= 0) & (tokens < VOCAB), tokens, 0)


@triton.jit
def continuation(text, length, VOCAB: tl.constexpr, AT: tl.constexpr):
    """Return a guess, int32 [token_lanes], of the tokens after ``text``, int32 [length >= 1]. All
    of them are ``in_vocabulary``. The guess copies what follows the longest match of the text's
    last tokens, and of equal matches the latest. It repeats beyond the text's end. Without a match
    the newest token repeats."""
    end = length - 1
    best = end * 0  # largest ``matching tokens << 32 | place + 1`` of all positions
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
