"""Predictions and fallbacks, on the host: the draft writes them, the target reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.protocol.draft_probs import are_sound
from vllm_ssd.protocol.speculation_table import SpeculationTable


class PredictionWriter:
    """The draft's end: writes predictions and fallbacks. It begins a record only if the stamp there
    is no later one, and continues it only if the stamp there is its own. So a draft that hung, and
    lost the table to another draft, leaves the other's records alone, whose generations are
    later."""

    def __init__(self, table: SpeculationTable):
        self._prediction = prediction = table.slots["prediction"]
        self._fallback = fallback = table.slots["fallback"]
        # The draft reads these for every request of every round. Arrays of one field are several
        # times as fast as records.
        self._stamps, self._fallback_stamps = prediction["stamp"], fallback["stamp"]
        self._counts, self._accepted = prediction["count"], prediction["accepted"]
        self._bonus = prediction["bonus"]
        drafts = ("stamp", "depth", "tokens", "top_probs")
        self._in_branches, self._in_fallbacks = (
            [records[field] for field in drafts] for records in (prediction, fallback)
        )

    def publish(
        self, slot: int, stamp: np.uint64, accepted: Sequence[int], bonus: Sequence[int]
    ) -> None:
        """Predict outcomes of round ``stamp``, each an accepted length and a bonus; their branches
        have no tokens yet."""
        at = slot, int(stamp) & 1
        if self._stamps.item(at) > stamp:
            return
        record = self._prediction[at]
        record["stamp"] = 0
        record["depth"] = 0
        record["count"] = len(accepted)
        record["accepted"][: len(accepted)] = accepted
        record["bonus"][: len(bonus)] = bonus
        record["stamp"] = stamp

    def extend(
        self,
        slot: int,
        stamp: np.uint64,
        tokens: Sequence[int],
        draft_probs: NDArray[np.int64] | None = None,
        top_probs: NDArray[np.float32] | float = np.nan,
    ) -> None:
        """Add one token to every branch of the prediction, in the order of its outcomes. Does
        nothing if they have all k. draft_probs: int64 [branches, top_m], their distributions.
        top_probs: float32 [branches], as the table has them."""
        at = slot, int(stamp) & 1
        if self._stamps.item(at) != stamp:
            return
        record = self._prediction[at]
        depth = int(record["depth"])
        if depth == record["tokens"].shape[1]:
            return  # this step only showed the model the last tokens
        record["tokens"][: len(tokens), depth] = tokens
        record["top_probs"][: len(tokens), depth] = top_probs
        if draft_probs is not None:
            record["draft_probs"][: len(tokens), depth] = draft_probs
        record["depth"] = depth + 1
        if self._stamps.item(at) != stamp:
            # This process was stopped here, and another draft has begun the record anew. The record
            # is damaged: targets must not use it.
            record["stamp"] = 0

    def publish_fallback(
        self,
        slot: int,
        stamp: np.uint64,
        tokens: Sequence[int],
        known: int = 0,
        draft_probs: NDArray[np.int64] | None = None,
        top_probs: NDArray[np.float32] | float = np.nan,
    ) -> None:
        """Add drafts for the outcome ``stamp``, which was not predicted. known: drafts that are
        published already. draft_probs: int64 [len(tokens), top_m], the tokens' distributions.
        top_probs: float32 [len(tokens)], as the table has them."""
        at = slot, int(stamp) & 1
        there = self._fallback_stamps.item(at)
        if known == self._fallback["tokens"].shape[-1]:
            return  # this step only showed the model the last token
        if there != stamp and (known or there > stamp):
            return
        record = self._fallback[at]
        if not known:
            record["stamp"] = 0
        depth = known + len(tokens)
        record["tokens"][known:depth] = tokens
        record["top_probs"][known:depth] = top_probs
        if draft_probs is not None:
            record["draft_probs"][known:depth] = draft_probs
        record["depth"] = depth
        record["stamp"] = stamp

    def branch_of(self, slot: int, stamp: int, accepted: int, bonus: int) -> int | None:
        """Index of the branch that predicted this outcome of round ``stamp``; -1 if none did; None
        if the round's prediction has not been published."""
        at = slot, stamp & 1
        if self._stamps.item(at) != stamp:
            return None
        known = *at, slice(self._counts.item(at))
        lengths, tokens = self._accepted[known].tolist(), self._bonus[known].tolist()
        for branch, length in enumerate(lengths):
            if length == accepted and tokens[branch] == bonus:
                return branch
        return -1

    def drafts(self, slot: int, stamp: int, branch: int | None) -> tuple[list[int], list[float]]:
        """The tokens published for a branch of round ``stamp``, or for its fallback (None), and
        their top_probs; empty for another round."""
        at = slot, stamp & 1
        fields = self._in_fallbacks if branch is None else self._in_branches
        stamps, depths, tokens, top_probs = fields
        depth = slice(depths.item(at) if stamps.item(at) == stamp else 0)
        place = (*at, depth) if branch is None else (*at, branch, depth)
        return tokens[place].tolist(), top_probs[place].tolist()

    def clear(self, slot: int, generation: int) -> None:
        """Withdraw what was published in a slot for this generation and for earlier ones."""
        for stamps in (self._stamps[slot], self._fallback_stamps[slot]):
            stamps[stamps >> np.uint64(32) <= generation] = 0


@dataclass(frozen=True)
class LookupResult:
    """The drafts that the table holds for an outcome.

    published: the draft has predicted outcomes of this round. predicted: this outcome is one of
    them; if not, any tokens are the draft's fallback. tokens: drafts ready for it, 0..k.
    draft_probs: int64 [len(tokens), top_m], the distributions of the tokens.
    """

    published: bool
    predicted: bool
    tokens: list[int]
    draft_probs: NDArray[np.int64]


class PredictionReader:
    """The target's end: finds the drafts for an outcome. vocab_size: drafts outside
    ``0..vocab_size-1`` are damaged and are not used."""

    def __init__(self, table: SpeculationTable, vocab_size: int):
        self._k = table.shape.k
        self._branches = table.shape.branches
        self._vocab_size = vocab_size
        self._top_m = table.shape.top_m
        self._nothing: tuple[list[int], NDArray[np.int64]] = ([], np.zeros((0, self._top_m), "i8"))
        self._prediction = table.slots["prediction"]
        self._fallback = table.slots["fallback"]

    def find(self, slot: int, stamp: np.uint64, accepted: int, bonus: int) -> LookupResult:
        """The drafts ready for an outcome. Records with any other stamp are never used."""
        parity = int(stamp) & 1
        record = self._prediction[slot, parity]
        published = predicted = False
        tokens, draft_probs = self._nothing
        if record["stamp"] == stamp:
            count = min(max(int(record["count"]), 0), self._branches)
            match = (record["accepted"][:count] == accepted) & (record["bonus"][:count] == bonus)
            rows = np.flatnonzero(match)
            if len(rows):
                depth = min(max(int(record["depth"]), 0), self._k)
                tokens, draft_probs = self._drafts(record, depth, rows[0])
            if record["stamp"] == stamp:
                published, predicted = True, len(rows) > 0
            else:
                tokens, draft_probs = self._nothing
        fallback = self._fallback[slot, parity]
        if fallback["stamp"] == stamp:
            depth = min(max(int(fallback["depth"]), 0), self._k)
            if depth > len(tokens):
                drafts = self._drafts(fallback, depth)
                if fallback["stamp"] == stamp:
                    tokens, draft_probs = drafts
        known = all(0 <= token < self._vocab_size for token in tokens)
        if not known or not are_sound(tokens, draft_probs, self._vocab_size):
            tokens = []
        return LookupResult(published, predicted, tokens, draft_probs[: len(tokens)])

    def _drafts(
        self, record: np.void, depth: int, *branch: int
    ) -> tuple[list[int], NDArray[np.int64]]:
        """Copies of the first ``depth`` drafts of a branch, or of a fallback, and of their
        distributions, int64 [depth, top_m]."""
        place = (*branch, slice(depth))
        tokens: list[int] = record["tokens"][place].tolist()
        if not self._top_m:
            return tokens, np.zeros((depth, 0), np.int64)
        return tokens, record["draft_probs"][place].copy()

    def newest(self, slot: int) -> np.uint64:
        """The latest round the draft has published anything for, as a stamp; 0 before any."""
        newest: np.uint64 = max(
            self._prediction[slot]["stamp"].max(), self._fallback[slot]["stamp"].max()
        )
        return newest
