"""The target's reads and writes of the speculation table, with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.proposals import are_sound
from vllm_ssd.table import GIVEN_UP, PREPARING, SpeculationTable, split_stamp


@dataclass(frozen=True)
class Finding:
    """What the table holds for an outcome.

    published: the draft has predicted outcomes of this very round. predicted: ours is one of them
    (if not, any tokens are the draft's answer to the miss). tokens: drafts ready for it, 0..k.
    entries: int64 [len(tokens), top_m], what they were sampled from.
    """

    published: bool
    predicted: bool
    tokens: list[int]
    entries: NDArray[np.int64]


class TargetMailbox:
    """``vocab_size``: drafts outside ``0..vocab_size-1`` are damage and are not used."""

    def __init__(self, table: SpeculationTable, vocab_size: int):
        self._k = table.shape.k
        self._branches = table.shape.branches
        self._vocab_size = vocab_size
        self._top_m = table.shape.top_m
        self._nothing: tuple[list[int], NDArray[np.int64]] = ([], np.zeros((0, self._top_m), "i8"))
        self._outcome = table.slots["outcome"]
        self._tail = table.slots["tail"]
        self._state = table.slots["state"]
        self._prediction = table.slots["prediction"]
        self._answer = table.slots["answer"]

    def publish(
        self, slot: int, stamp: np.uint64, length: int, accepted: int, new_tokens: Sequence[int]
    ) -> None:
        """Tell the draft an outcome: ``new_tokens`` (bonus last) end a text of ``length`` tokens.
        ``accepted`` is -1 if they are of several rounds.

        Of ``new_tokens`` only what fits the slot's tail is kept; the draft notices a gap.
        """
        tail = self._tail[slot]
        kept = new_tokens[-len(tail) :]
        tail[np.arange(length - len(kept), length) % len(tail)] = kept
        record = self._outcome[slot, int(stamp) & 1]
        record["stamp"] = 0
        record["drafts_stamp"] = 0
        record["length"] = length
        record["accepted"] = accepted
        record["bonus"] = new_tokens[-1]
        record["stamp"] = stamp

    def confirm(self, slot: int, stamp: np.uint64, drafts: Sequence[int]) -> None:
        """Tell the draft which drafts will be verified in the round after this outcome."""
        record = self._outcome[slot, int(stamp) & 1]
        record["num_drafts"] = len(drafts)
        record["drafts"][: len(drafts)] = drafts
        record["drafts_stamp"] = stamp

    def find(self, slot: int, stamp: np.uint64, accepted: int, bonus: int) -> Finding:
        """The drafts ready for an outcome. Records with any other stamp are never used."""
        parity = int(stamp) & 1
        record = self._prediction[slot, parity]
        published = predicted = False
        tokens, entries = self._nothing
        if record["stamp"] == stamp:
            count = min(max(int(record["count"]), 0), self._branches)
            match = (record["accepted"][:count] == accepted) & (record["bonus"][:count] == bonus)
            rows = np.flatnonzero(match)
            if len(rows):
                depth = min(max(int(record["depth"]), 0), self._k)
                tokens, entries = self._drafts(record, depth, rows[0])
            if record["stamp"] == stamp:
                published, predicted = True, len(rows) > 0
            else:
                tokens, entries = self._nothing
        answer = self._answer[slot, parity]
        if answer["stamp"] == stamp:
            depth = min(max(int(answer["depth"]), 0), self._k)
            if depth > len(tokens):
                reply = self._drafts(answer, depth)
                if answer["stamp"] == stamp:
                    tokens, entries = reply
        known = all(0 <= token < self._vocab_size for token in tokens)
        if not known or not are_sound(tokens, entries, self._vocab_size):
            tokens = []
        return Finding(published, predicted, tokens, entries[: len(tokens)])

    def _drafts(
        self, record: np.void, depth: int, *branch: int
    ) -> tuple[list[int], NDArray[np.int64]]:
        """Copies of the first ``depth`` drafts of a branch, or of an answer, and their entries."""
        place = (*branch, slice(depth))
        tokens: list[int] = record["tokens"][place].tolist()
        if not self._top_m:
            return tokens, np.zeros((depth, 0), np.int64)
        return tokens, record["proposals"][place].copy()

    def newest(self, slot: int) -> np.uint64:
        """The latest round the draft has published anything for, as a stamp; 0 before any."""
        newest: np.uint64 = max(
            self._prediction[slot]["stamp"].max(), self._answer[slot]["stamp"].max()
        )
        return newest

    def draft_state(self, slot: int, generation: int) -> int:
        """What the draft says of this request: one of the states of ``table.py``."""
        owner, state = split_stamp(self._state[slot])
        if owner > generation:
            return GIVEN_UP  # the slot is another's by now
        return state if owner == generation else PREPARING
