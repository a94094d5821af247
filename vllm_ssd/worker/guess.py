"""What a row verifies that got no drafts, where it verifies something in any case.

The request's own text, continued as it went on after the place that is most like its end. Costs
nothing, as Model Runner V2 verifies k tokens of every row, and is right where texts repeat
themselves. The draft is not told: its branches stay where the outcome most likely is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LONGEST = 4  # tokens at the end of the text that are compared
REACH = 8192  # how far back


def continuation(text: NDArray[np.int32], k: int) -> NDArray[np.int32]:
    """int32 [k] after a text, int32 [length >= 1].

    Of the places whose last tokens equal those of the text, the longest match counts, then the
    latest place. What follows it is continued periodically beyond the end of the text; without a
    match the newest token is repeated.
    """
    end = len(text) - 1
    first = max(0, end - REACH)
    place = np.arange(first, end)
    same = np.ones(len(place), bool)
    matched = np.zeros(len(place), np.int64)
    for back in range(min(LONGEST, end)):
        same &= (place >= back) & (text[np.maximum(place - back, 0)] == text[end - back])
        matched += same
    if not matched.any():
        return np.full(k, text[end])
    best = first + len(place) - 1 - int(np.argmax(matched[::-1]))
    return text[best + 1 + np.arange(k) % (end - best)]
