"""Predictions, fallbacks among them, on the host: the draft writes them, the target reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.table.draft_probs import are_sound
from vllm_ssd.table.schema import FALLBACK, parity
from vllm_ssd.table.speculation_table import SpeculationTable


class PredictionWriter:
    """The draft's end: writes predictions. It begins a record only if the stamp there is an earlier
    one, and continues it only if the stamp there is its own. So a draft that hung, and lost the
    table to another draft, leaves the other's records alone, whose generations are later."""

    def __init__(self, table: SpeculationTable):
        self._prediction = prediction = table.slots["prediction"]
        # The draft reads these for every request of every round. Arrays of one field are several
        # times as fast as records.
        self._stamps, self._counts = prediction["stamp"], prediction["count"]
        self._accepted, self._bonus = prediction["accepted"], prediction["bonus"]
        self._depths, self._tokens = prediction["depth"], prediction["tokens"]
        self._top_probs = prediction["top_probs"]

    def publish(
        self, slot: int, stamp: np.uint64, accepted: Sequence[int], bonus: Sequence[int]
    ) -> None:
        """Predict outcomes of round ``stamp``, each an accepted length and a bonus; their branches
        have no tokens yet. A stamp with the mark ``FALLBACK`` has the one outcome that has come."""
        at = slot, parity(stamp)
        if self._stamps.item(at) >= stamp:
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
        draft_probs: NDArray[np.int64],
        top_probs: NDArray[np.float32],
    ) -> None:
        """Add one token to every branch of the prediction, in the order of its outcomes. Does
        nothing if they have all k. draft_probs: int64 [branches, top_m], their distributions.
        top_probs: float32 [branches], as the table has them."""
        at = slot, parity(stamp)
        if self._stamps.item(at) != stamp:
            return
        record = self._prediction[at]
        depth = int(record["depth"])
        if not 0 <= depth < record["tokens"].shape[1]:
            return  # this step only showed the model the last tokens, or the record is damaged
        record["tokens"][: len(tokens), depth] = tokens
        record["top_probs"][: len(tokens), depth] = top_probs
        record["draft_probs"][: len(tokens), depth] = draft_probs
        record["depth"] = depth + 1
        if self._stamps.item(at) != stamp:
            # This process was stopped here, and another draft has begun the record anew. The record
            # is damaged: targets must not use it.
            record["stamp"] = 0

    def branch_of(self, slot: int, stamp: int, accepted: int, bonus: int) -> int | None:
        """Index of the branch that predicted this outcome of round ``stamp``; -1 if none did; None
        if the round's prediction has not been published."""
        at = slot, parity(stamp)
        if self._stamps.item(at) != stamp:
            return None
        known = *at, slice(self._counts.item(at))
        lengths, tokens = self._accepted[known].tolist(), self._bonus[known].tolist()
        for branch, length in enumerate(lengths):
            if length == accepted and tokens[branch] == bonus:
                return branch
        return -1

    def drafts(self, slot: int, stamp: int, branch: int) -> tuple[list[int], list[float]]:
        """The tokens published for a branch of the prediction ``stamp``, and their top_probs; none
        if another prediction is there."""
        at = slot, parity(stamp)
        place = *at, branch, slice(self._depths.item(at) if self._stamps.item(at) == stamp else 0)
        return self._tokens[place].tolist(), self._top_probs[place].tolist()

    def clear(self, slot: int, generation: int) -> None:
        """Withdraw what was published in a slot for this generation and for earlier ones."""
        stamps = self._stamps[slot]
        stamps[stamps >> np.uint64(32) <= generation] = 0


@dataclass(frozen=True)
class LookupResult:
    """The drafts that the table holds for an outcome.

    predicted: it is one of the outcomes that the draft has predicted for this round. missed: it is
    none of them, and there is no fallback yet. tokens: drafts ready for it, 0..k. draft_probs:
    int64 [len(tokens), top_m], the distributions of the tokens.
    """

    predicted: bool
    missed: bool
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
        self._prediction = table.slots["prediction"]

    def find(self, slot: int, stamp: np.uint64, accepted: int, bonus: int) -> LookupResult:
        """The drafts ready for an outcome. Records of other rounds are never used."""
        record = self._prediction[slot, parity(stamp)]
        there = int(record["stamp"])
        nothing = np.zeros((0, self._top_m), np.int64)
        if there & ~FALLBACK != stamp:
            return LookupResult(False, False, [], nothing)
        count = min(max(int(record["count"]), 0), self._branches)
        match = (record["accepted"][:count] == accepted) & (record["bonus"][:count] == bonus)
        known = bool(match.any())
        depth = min(max(int(record["depth"]), 0), self._k) if known else 0
        place = match.argmax() if known else 0, slice(depth)
        tokens: list[int] = record["tokens"][place].tolist()
        draft_probs = record["draft_probs"][place].copy()
        if record["stamp"] != there:
            return LookupResult(False, False, [], nothing)
        in_vocabulary = all(0 <= token < self._vocab_size for token in tokens)
        if not in_vocabulary or not are_sound(tokens, draft_probs, self._vocab_size):
            tokens, draft_probs = [], nothing
        predicted, missed = there == stamp and known, there == stamp and not known
        return LookupResult(predicted, missed, tokens, draft_probs)

    def newest(self, slot: int) -> np.uint64:
        """The latest round the draft has published anything for, as a stamp; 0 before any."""
        return self._prediction[slot]["stamp"].max()
