"""Recorded rounds, as rules that choose branches see them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

RANKS = 16  # bonus candidates at each position


class Rounds(NamedTuple):
    """Recorded rounds, one a row. drafts: draft tokens verified; chances: [rows, k] the draft's
    probabilities of them; bonus: [rows, k + 1, RANKS] those of bonus candidates, likeliest first,
    0 = there is none; rank: of the real bonus among these, RANKS = not among them; following:
    tokens of the request's next round, 0 = it has none."""

    request: np.ndarray
    drafts: np.ndarray
    chances: np.ndarray
    bonus: np.ndarray
    accepted: np.ndarray
    rank: np.ndarray
    following: np.ndarray

    def take(self, rows: np.ndarray) -> "Rounds":
        return Rounds(*(column[rows] for column in self))


def load(file: Path, most: list[int]) -> Rounds:
    """The rounds of a record. most: drafts verified at most, a number of these in each round."""
    record = np.load(file)
    count, k = record["drafts"].shape
    drafts = np.minimum(np.random.default_rng(1).choice(most, count), k)
    accepted = np.minimum(record["accepted"], drafts)
    rows, places = np.arange(count), np.arange(k + 1)
    token = np.where(accepted == drafts, record["sampled"][rows, drafts], record["bonus"])
    drafted = np.pad(record["drafts"], ((0, 0), (0, 1)), constant_values=-1)
    drafted[places >= drafts[:, None]] = -1
    # Without the draft token that follows, the other candidates move up.
    order = np.argsort(record["candidates"] == drafted[:, :, None], axis=2, kind="stable")
    candidates = np.take_along_axis(record["candidates"], order, 2)[:, :, :RANKS]
    bonus = np.exp(np.take_along_axis(record["candidate_logprobs"], order, 2)[:, :, :RANKS])
    chances = np.exp(record["logprobs"])
    ruled_out = np.where(places[:k] < drafts[:, None], chances, 0)
    bonus[:, :k] /= np.maximum(1 - ruled_out, 1e-6)[:, :, None]
    bonus[places > drafts[:, None]] = 0
    rank = (np.cumsum(candidates[rows, accepted] == token[:, None], axis=1) == 0).sum(1)
    request = record["request"]
    order = np.argsort(request, kind="stable")
    following = np.zeros(count, dtype=np.int64)
    this, after = order[:-1], order[1:]
    following[this] = np.where(request[this] == request[after], accepted[after] + 1, 0)
    return Rounds(request, drafts, chances, bonus, accepted, rank, following).take(order)
