"""Host lookup: the target's reads and writes of the speculation table, with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ssd.table import GIVEN_UP, PREPARING, SpeculationTable, split_stamp


@dataclass(frozen=True)
class Finding:
    """What the table holds for an outcome.

    published: the draft has predicted outcomes of this very round. predicted: ours is one of them
    (if not, any tokens are the draft's answer to the miss). tokens: drafts ready for it, 0..k.
    """

    published: bool
    predicted: bool
    tokens: list[int]


class HostLookup:
    """``vocab_size``: drafts outside ``0..vocab_size-1`` are damage and are not used."""

    def __init__(self, table: SpeculationTable, vocab_size: int):
        self._k = table.shape.k
        self._branches = table.shape.branches
        self._vocab_size = vocab_size
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
        tokens: list[int] = []
        if record["stamp"] == stamp:
            count = min(max(int(record["count"]), 0), self._branches)
            match = (record["accepted"][:count] == accepted) & (record["bonus"][:count] == bonus)
            rows = np.flatnonzero(match)
            if len(rows):
                depth = min(max(int(record["depth"]), 0), self._k)
                tokens = record["tokens"][rows[0], :depth].tolist()
            if record["stamp"] == stamp:
                published, predicted = True, len(rows) > 0
            else:
                tokens = []
        answer = self._answer[slot, parity]
        if answer["stamp"] == stamp:
            depth = min(max(int(answer["depth"]), 0), self._k)
            if depth > len(tokens):
                reply = answer["tokens"][:depth].tolist()
                if answer["stamp"] == stamp:
                    tokens = reply
        if any(not 0 <= token < self._vocab_size for token in tokens):
            tokens = []
        return Finding(published, predicted, tokens)

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
