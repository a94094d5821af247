"""Outcomes and the drafts verified next, on the host: the target writes, the draft reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.table.schema import parity
from vllm_ssd.table.speculation_table import SpeculationTable


class OutcomeWriter:
    """The target's end: writes outcomes, and the drafts that it verifies next."""

    def __init__(self, table: SpeculationTable):
        self._outcome = table.slots["outcome"]
        self._tail = table.slots["tail"]

    def publish(
        self, slot: int, stamp: np.uint64, length: int, accepted: int, new_tokens: Sequence[int]
    ) -> None:
        """Tell the draft an outcome: ``new_tokens`` (bonus last) end a text of ``length`` tokens.
        accepted: the accepted length, -1 if the new tokens come from several rounds.

        The slot's tail keeps only the newest ``new_tokens`` that fit; the draft notices a gap.
        """
        tail = self._tail[slot]
        kept = new_tokens[-len(tail) :]
        tail[np.arange(length - len(kept), length) % len(tail)] = kept
        record = self._outcome[slot, parity(stamp)]
        record["stamp"] = 0
        record["drafts_stamp"] = 0
        record["length"] = length
        record["accepted"] = accepted
        record["bonus"] = new_tokens[-1]
        record["stamp"] = stamp

    def confirm(self, slot: int, stamp: np.uint64, drafts: Sequence[int]) -> None:
        """Tell the draft which drafts will be verified in the round after this outcome."""
        record = self._outcome[slot, parity(stamp)]
        record["num_drafts"] = len(drafts)
        record["drafts"][: len(drafts)] = drafts
        record["drafts_stamp"] = stamp


class Outcome(NamedTuple):
    """A round's outcome as the target published it.

    length: tokens of the text including the bonus. new_tokens: its last tokens, from the length
    the reader asked for; None if the target's tail no longer reaches back that far.
    """

    length: int
    accepted: int
    bonus: int
    new_tokens: list[int] | None


class OutcomeReader:
    """The draft's end: finds the new outcomes of all slots at once, then reads them. It reads
    numbers with ``item`` from arrays of one field, which takes a tenth of the time of reading a
    record."""

    def __init__(self, table: SpeculationTable):
        self._k = table.shape.k
        self._tail_size = table.shape.tail
        outcome = table.slots["outcome"]
        self._stamps, self._lengths = outcome["stamp"], outcome["length"]
        self._even, self._odd = self._stamps[:, 0], self._stamps[:, 1]
        self._accepted, self._bonus = outcome["accepted"], outcome["bonus"]
        self._drafts_stamps, self._num_drafts = outcome["drafts_stamp"], outcome["num_drafts"]
        self._drafts = outcome["drafts"]
        self._tail = table.slots["tail"]
        self._read = np.zeros(table.shape.slots, np.uint64)  # stamps, by slot

    def unread(self) -> list[tuple[int, int]]:
        """Slot and stamp of each newest outcome that has not been read."""
        newest = self.newest_stamps()
        slots = np.flatnonzero(newest != self._read)
        return list(zip(slots.tolist(), newest[slots].tolist())) if len(slots) else []

    def newest_stamps(self) -> NDArray[np.uint64]:
        """uint64 [slots]: the newest outcome of each slot, 0 where there is none."""
        return np.maximum(self._even, self._odd)

    def read(self, slot: int, stamp: int, known: int) -> Outcome | None:
        """The outcome with this stamp and the tokens after the first ``known`` of the text.

        None if the target has moved on meanwhile: the newest stamp is then another.
        """
        at = slot, parity(stamp)
        length = self._lengths.item(at)
        accepted, bonus = self._accepted.item(at), self._bonus.item(at)
        new_tokens: list[int] | None = None
        # Half the tail, since a newer outcome may be overwriting its oldest tokens right now.
        if 0 <= length - known <= self._tail_size // 2:
            begin, end = known % self._tail_size, length % self._tail_size
            tail = self._tail[slot]
            if begin <= end:
                new_tokens = tail[begin:end].tolist()
            else:
                new_tokens = tail[begin:].tolist() + tail[:end].tolist()
        if max(self._even.item(slot), self._odd.item(slot)) != stamp:
            return None
        self._read[slot] = stamp
        return Outcome(length, accepted, bonus, new_tokens)

    def read_drafts(self, slot: int, stamp: int) -> list[int] | None:
        """The drafts the target verifies after this outcome; None if it has not decided yet."""
        at = slot, parity(stamp)
        if self._drafts_stamps.item(at) != stamp:
            return None
        count = min(max(self._num_drafts.item(at), 0), self._k)
        drafts: list[int] = self._drafts[*at, :count].tolist()
        return drafts if self._drafts_stamps.item(at) == stamp else None
