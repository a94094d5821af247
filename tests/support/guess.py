"""What ``worker/guess_kernels.py`` is to guess, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.worker.guess_kernels import LONGEST, REACH


def in_vocabulary(tokens: NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """The tokens of a text, with 0 in place of those that no model can produce.

    A multimodal prompt has placeholders with ids outside the vocabulary, which the target has no
    embeddings and no probabilities for.
    """
    return np.where((tokens >= 0) & (tokens < vocab_size), tokens, np.int32(0))


def continuation(text: NDArray[np.int32], k: int, vocab_size: int) -> NDArray[np.int32]:
    """int32 [k] after a text, int32 [length >= 1]; all of them ``in_vocabulary``.

    Of the positions whose last tokens equal those of the text, the longest match counts, then the
    latest position. What follows it is continued periodically beyond the end of the text; without a
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
        return in_vocabulary(np.full(k, text[end]), vocab_size)
    best = first + len(place) - 1 - int(np.argmax(matched[::-1]))
    return in_vocabulary(text[best + 1 + np.arange(k) % (end - best)], vocab_size)
