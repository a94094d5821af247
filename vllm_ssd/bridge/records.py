"""The kinds of records of a slot that a bridge copies to the table on the other node, as bytes.

``changes`` reads the stamp, the body and the stamp again, like all readers of the table. ``write``
writes the body first and the stamp last. It refuses a record that does not fit the table with
``Malformed`` before it writes anything. The bridge does not check tokens and distributions: readers
of the table do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.bridge.changes import Changed, Malformed
from vllm_ssd.table import LOST, SpeculationTable
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.outcomes import OutcomeReader, OutcomeWriter
from vllm_ssd.table.schema import parity

_32 = np.uint64(32)  # bits of a stamp's round; its generation is above them


class Side(Enum):
    """The two sides that write a table."""

    TARGET, DRAFT = range(2)


class Record:
    """One kind of record in one table. writer: the only side that writes it. number: index of the
    kind, which ``Changed`` carries. Each kind keeps what it has sent of its slots, and skips values
    that were overwritten between two calls of ``changes``."""

    writer: ClassVar[Side]

    def __init__(self, table: SpeculationTable, number: int):
        self._number = number

    def begin(self, slot: int, length: int) -> None:
        """Note that the other end has ``length`` tokens of the request now in this slot."""

    def changes(self, generations: NDArray[np.uint64]) -> Iterator[Changed]:
        """Changes since the last call. A record that is being written now comes with a later call.
        generations: uint64 [slots], that of each slot's request; 0 = send nothing of the slot."""
        raise NotImplementedError

    def write(self, changed: Changed) -> None:
        """Write a change from the other end; raises ``Malformed``. The caller has checked that its
        slot and its request exist."""
        raise NotImplementedError


class Outcome(Record):
    """The newest outcome of a text. head: accepted length, -1 if the tokens belong to several
    rounds. tokens: the tokens of the text after the known ones. In a change without a head, they
    are the draft tokens that the target verifies in the next round."""

    writer = Side.TARGET

    def __init__(self, table: SpeculationTable, number: int):
        super().__init__(table, number)
        self._k, self._tail = table.shape.k, table.shape.tail
        self._reader, self._writer = OutcomeReader(table), OutcomeWriter(table)
        self._states = DraftStates(table)
        self._confirmed = table.slots["outcome"]["drafts_stamp"].T  # by parity, then slot
        self._told = np.zeros(table.shape.slots, np.uint64)  # stamps of outcomes
        self._told_drafts = np.zeros(table.shape.slots, np.uint64)  # and of their draft tokens
        self._lengths = [0] * table.shape.slots  # tokens of the text that the other end has

    def begin(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def changes(self, generations: NDArray[np.uint64]) -> Iterator[Changed]:
        """If the table no longer has all new tokens of a text, the target must add the request
        again: its state becomes LOST and its generation 0."""
        newest, confirmed = self._reader.newest_stamps(), np.maximum(*self._confirmed)
        differ = (newest != self._told) | (confirmed != self._told_drafts)
        if not differ.any():
            return
        for slot in np.flatnonzero(differ & (newest >> _32 == generations)).tolist():
            stamp = newest.item(slot)
            if stamp != self._told.item(slot):
                known = self._lengths[slot]
                outcome = self._reader.read(slot, stamp, known)
                if outcome is None:
                    continue
                if not outcome.new_tokens:
                    self._states.set(slot, generations.item(slot), LOST)
                    generations[slot] = 0
                    continue
                self._told[slot], self._lengths[slot] = stamp, outcome.length
                tokens = pack(outcome.new_tokens)
                yield Changed(self._number, slot, stamp, known, pack([outcome.accepted]), tokens)
            drafts = self._reader.read_drafts(slot, stamp)
            if drafts is not None and stamp != self._told_drafts.item(slot):
                self._told_drafts[slot] = stamp
                yield Changed(self._number, slot, stamp, tokens=pack(drafts))

    def write(self, changed: Changed) -> None:
        slot, stamp = changed.slot, np.uint64(changed.stamp)
        if not changed.head:
            self._writer.confirm(slot, stamp, int32s(changed.tokens, self._k).tolist())
            return
        (accepted,) = int32s(changed.head, 1).tolist()
        tokens = int32s(changed.tokens, self._tail).tolist()
        if not tokens or not -1 <= accepted <= self._k:
            raise Malformed(f"{len(tokens)} new tokens with {accepted} accepted drafts")
        self._writer.publish(slot, stamp, changed.known + len(tokens), accepted, tokens)


class State(Record):
    """The draft's state for a request, sent as the table's word."""

    writer = Side.DRAFT

    def __init__(self, table: SpeculationTable, number: int):
        super().__init__(table, number)
        self._words = table.slots["state"]
        self._told = np.zeros_like(self._words)

    def changes(self, generations: NDArray[np.uint64]) -> Iterator[Changed]:
        new = (self._words != self._told) & (self._words >> _32 == generations)
        for slot in np.flatnonzero(new).tolist():
            self._told[slot] = word = self._words.item(slot)
            yield Changed(self._number, slot, word)

    def write(self, changed: Changed) -> None:
        self._words[changed.slot] = changed.stamp


class Prediction(Record):
    """Predicted outcomes of a round, with a branch each. A slot has a record for each parity. Draft
    tokens arrive a few steps at a time. tokens: those after the known ones, ordered by step, then
    branch, and after them their ``top_probs`` as float32. probs: ``pack_probs`` of each token's
    distribution. head: the numbers of the record between stamp and tokens, of which the first is
    the number of branches; sent only while no tokens are known."""

    writer = Side.DRAFT

    def __init__(self, table: SpeculationTable, number: int):
        super().__init__(table, number)
        shape, records = table.shape, table.slots["prediction"]
        self._k, self._branches, self._top_m = shape.k, shape.branches, shape.top_m
        self._stamps, self._depths = records["stamp"], records["depth"]
        self._heads = _heads(records)
        self._tokens, self._top_probs = records["tokens"], records["top_probs"]
        self._probs = records["draft_probs"]
        self._told, self._told_depths = np.zeros_like(self._stamps), np.zeros_like(self._depths)

    def changes(self, generations: NDArray[np.uint64]) -> Iterator[Changed]:
        differ = (self._stamps != self._told) | (self._depths != self._told_depths)
        if not differ.any():
            return
        new = differ & (self._stamps >> _32 == generations[:, None])
        for slot, half in np.argwhere(new & (self._stamps != 0)).tolist():
            at = slot, half
            stamp, depth = self._stamps.item(at), self._depths.item(at)
            told = self._told_depths.item(at) if self._told.item(at) == stamp else 0
            known = told if depth > told else 0  # 0: a new record
            head = self._heads[at].copy()
            new_tokens = *at, slice(head[0]), slice(known, depth)
            tokens, probs = self._tokens[new_tokens].T.tobytes(), b""
            tokens += self._top_probs[new_tokens].T.tobytes()
            if self._top_m:
                by_step = self._probs[new_tokens].swapaxes(0, 1)
                probs = pack_probs(by_step.reshape(-1, self._top_m))
            if self._stamps.item(at) != stamp:
                continue
            self._told[at], self._told_depths[at] = stamp, depth
            sent = b"" if known else head.tobytes()
            yield Changed(self._number, slot, stamp, known, sent, tokens, probs)

    def write(self, changed: Changed) -> None:
        stamp, known = changed.stamp, changed.known
        at = changed.slot, parity(stamp)
        there = self._stamps.item(at)
        if there > stamp or (known and (there != stamp or self._depths.item(at) != known)):
            return  # this end has a newer record, or has withdrawn this one
        numbers = self._heads.shape[-1]
        head = self._heads[at] if known else int32s(changed.head, numbers)
        if len(head) != numbers or not 0 <= head[0] <= self._branches:
            raise Malformed("a head that does not fit")
        branches = int(head[0])
        words = int32s(changed.tokens, 2 * self._k * branches)
        steps = len(words) // max(2 * branches, 1)
        if len(words) != 2 * steps * branches or known + steps > self._k:
            raise Malformed(f"{len(words)} words for {branches} branches of {known}")
        tokens, top_probs = words.reshape(2, steps, branches)
        probs = unpack_probs(changed.probs, tokens.size, self._top_m) if self._top_m else None
        if not known:
            self._stamps[at] = 0
            self._heads[at] = head
        new = *at, slice(branches), slice(known, known + steps)
        self._tokens[new], self._top_probs[new] = tokens.T, top_probs.view("<f4").T
        if probs is not None:
            self._probs[new] = probs.reshape(steps, branches, self._top_m).swapaxes(0, 1)
        self._depths[at] = known + steps
        self._stamps[at] = stamp


def _heads(records: NDArray) -> NDArray[np.int32]:
    """int32 [.., n], a view: the numbers between stamp and tokens of each record."""
    size, fields = records.dtype.itemsize, records.dtype.fields
    assert fields is not None
    head = ("<i4", (fields["tokens"][1] - 8) // 4)
    layout = np.dtype({"names": ["head"], "formats": [head], "offsets": [8], "itemsize": size})
    return records.view(layout)["head"]


def pack(numbers: Sequence[int]) -> bytes:
    """The numbers as int32, little-endian."""
    return np.array(numbers, "<i4").tobytes()


def int32s(data: bytes, most: int) -> NDArray[np.int32]:
    """The int32 numbers in ``data``; raises ``Malformed`` for more than ``most`` numbers."""
    if len(data) % 4 or len(data) > 4 * most:
        raise Malformed(f"{len(data)} bytes where {most} numbers of 4 bytes are the most")
    return np.frombuffer(data, "<i4")


def pack_probs(draft_probs: NDArray[np.int64]) -> bytes:
    """Bytes of entries int64 [rows, top_m], without entries of no mass: first the number of entries
    of each row, a byte each, then all entries."""
    massive = (draft_probs >> 32) != 0
    counts = massive.sum(-1).astype("u1")
    return counts.tobytes() + draft_probs[massive].tobytes()


def unpack_probs(data: bytes, rows: int, top_m: int) -> NDArray[np.int64]:
    """Entries int64 [rows, top_m] from the bytes of ``pack_probs``; raises ``Malformed``. Entries
    with mass come first in each row. The others get tokens that are not yet in the row, because
    the tokens of a distribution must differ."""
    counts = np.frombuffer(data[:rows], "u1")
    entries = data[rows:]
    if len(counts) != rows or (counts > top_m).any() or len(entries) != 8 * int(counts.sum()):
        raise Malformed(f"{len(data)} bytes are not the distributions of {rows} drafts")
    listed = np.arange(top_m) < counts[:, None]
    found = np.zeros((rows, top_m), np.int64)
    found[listed] = np.frombuffer(entries, "<i8")
    # A row lists at most half of the tokens below 2 * top_m, so enough others remain.
    tokens = found & 0xFFFFFFFF
    row, rank = np.nonzero(listed & (tokens < 2 * top_m))
    present = np.zeros((rows, 2 * top_m), bool)
    present[row, tokens[row, rank]] = True
    others = np.argsort(present, axis=1, kind="stable")[:, :top_m]
    return np.where(listed, found, others)
