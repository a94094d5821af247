"""How likely each outcome of a round is, learned from the outcomes of all requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NEWEST = 0.005  # weight of the newest outcome among all
_LARGE = 1e100  # weights of outcomes stay below this
# The draft's doubt about a draft is 1 less its largest probability there. At first, this share of
# the doubts comes true. The weight is in doubts that add up, the newest one's is among all.
_OVER_DOUBT, _DOUBT_WEIGHT, _NEWEST_DOUBT = 0.5, 4.0, 0.001


class OutcomeProbs:
    """The probability of each outcome, by accepted length and rank of the bonus. The latest count
    most. branches: the most there can be; ranks beyond them do not matter.

    A share c of the draft's doubts comes true. So a draft is accepted with probability
    ``1 - c * doubt``, with one learned number c. The rank depends only on whether a draft was
    rejected. So what rounds with few drafts teach holds for longer ones. A target with many
    requests trims: it verifies a part of the drafts. Outcomes after which a row goes on with drafts
    that it has need no branch.
    """

    def __init__(self, k: int, branches: int):
        # The doubts about verified drafts, added up, and the number of these that were rejected.
        self._doubted, self._rejected_of = 0.0, 0.0
        # By load and position: of the drafts that came true after all before them, the share that
        # was not verified.
        self._left_over: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * k)
        self._k = k
        # At first, the bonus is not among the F likeliest tokens with probability 1 / (F + 1): the
        # power law of arXiv 2603.03251 with r = 1.
        self._by_rank = [1 / ((rank + 1) * (rank + 2)) for rank in range(branches + 1)]
        # Weights of the bonus's ranks after a rejected draft, and after none. Each new outcome gets
        # more weight than the one before, so that older ones stay as they are.
        self._rejected, self._whole = self._by_rank.copy(), self._by_rank.copy()
        self._weight = _NEWEST

    def fan_outs(
        self, branches: int, top_probs: Sequence[Sequence[float]], loads: Sequence[int]
    ) -> NDArray[np.int64]:
        """int64 [rows, k + 1]: for each row, the branches of each accepted length, ``branches``
        together, with which it misses least. top_probs: the draft's largest probability at each of
        a row's drafts, nan if it is not known. loads: how many requests each row's target has."""
        lengths, whole = self._lengths(top_probs, loads)
        weights = np.array([self._rejected, self._whole])
        by_rank = (weights / weights.sum(axis=1, keepdims=True))[:, :branches]
        # A rank that seems likelier than the one before it is taken for as likely.
        np.minimum.accumulate(by_rank, axis=1, out=by_rank)
        chances = lengths[:, :, None] * by_rank[whole.view(np.int8)]
        rows, places = lengths.shape
        best = chances.reshape(rows, -1).argpartition(-branches, axis=1)[:, -branches:]
        # If nothing seems possible, any length may be best, also one beyond a row's drafts.
        length = np.minimum(best // branches, whole.argmax(axis=1)[:, None])
        length += np.arange(rows)[:, None] * places
        return np.bincount(length.ravel(), minlength=whole.size).reshape(whole.shape)

    def _lengths(
        self, top_probs: Sequence[Sequence[float]], loads: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """float64 [rows, k + 1], the probability of each accepted length, as far as its outcomes
        need a branch; and bool [rows, k + 1], whether it is all of a row's drafts. top_probs and
        loads: as in ``fan_outs``."""
        length, last = np.arange(self._k + 1), np.array([*map(len, top_probs)])[:, None]
        verified = length[:-1] < last
        probs = np.full(verified.shape, np.nan)
        probs[verified] = [*chain.from_iterable(top_probs)]
        doubts = np.where(_is_known(probs), 1 - probs, 1.0)
        share = self._rejected_of + _OVER_DOUBT * _DOUBT_WEIGHT
        share /= self._doubted + _DOUBT_WEIGHT
        acceptance = np.maximum(1 - share * doubts, 0)
        whole = length == last
        chances = whole.astype(float)
        np.subtract(1, acceptance, out=chances[:, :-1], where=verified)
        goes_on = acceptance * (1 - np.array([self._left_over[_size(load)] for load in loads]))
        chances[:, 1:] *= goes_on.cumprod(axis=1)
        return chances, whole

    def count_drafts(
        self, top_probs: Sequence[float], accepted: int, left_over: bool, load: int
    ) -> None:
        """Take in that the target accepted the first ``accepted`` of a round's drafts. top_probs:
        as in ``fan_outs``. left_over: the next one came true, too, and was not verified."""
        trimmed = self._left_over[_size(load)]
        for position, prob in enumerate(top_probs[: accepted + 1]):
            verified = position < accepted
            right = verified or left_over
            doubt = 1 - prob if _is_known(prob) else 1.0
            self._doubted += doubt - _NEWEST_DOUBT * self._doubted
            self._rejected_of += (not right) - _NEWEST_DOUBT * self._rejected_of
            if right:
                trimmed[position] += _NEWEST * ((not verified) - trimmed[position])

    def count_bonus(self, rejected: bool, rank: int | None, predicted: int) -> None:
        """Take in the rank of a bonus. rejected: whether a draft was. rank: None if the bonus is
        not among the ``predicted`` likeliest tokens."""
        self._weight /= 1 - _NEWEST
        if self._weight > _LARGE:
            for row in (self._rejected, self._whole):
                row[:] = [weight / self._weight for weight in row]
            self._weight = 1.0
        row = self._rejected if rejected else self._whole
        if rank is not None:
            row[rank] += self._weight
        else:
            tail = self._by_rank[predicted:]
            each = self._weight / sum(tail)
            row[predicted:] = [w + each * chance for w, chance in zip(row[predicted:], tail)]


def _size(load: int) -> int:
    """Loads of a like size: those between two powers of two."""
    return (load - 1).bit_length()


def _is_known(top_prob: Any) -> Any:
    """Whether a top probability, or each of an array, is known and not damaged. If not, the doubt
    is 1."""
    return (top_prob >= 0) & (top_prob <= 1)
