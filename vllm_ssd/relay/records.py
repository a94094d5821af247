"""The kinds of records of a slot that a relay copies to the table on the other node, as bytes.

``news`` reads the stamp, the body and the stamp again, like all readers of the table. ``write``
writes the body first and the stamp last. It refuses a record that does not fit the table with
``Malformed`` before it writes anything. The relay does not check tokens and distributions: readers
of the table do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.protocol import SpeculationTable
from vllm_ssd.protocol.outcomes import OutcomeReader, OutcomeWriter
from vllm_ssd.relay.frames import Changed, Malformed


class Side(Enum):
    """The two sides that write a table."""

    TARGET, DRAFT = range(2)


class TooFarBehind(Exception):
    """The table no longer has all new tokens of a text: the target must add the request again."""


class News(NamedTuple):
    """Changes of one record; the fields go into the ``Changed`` frame."""

    stamp: int
    known: int = 0
    head: bytes = b""
    tokens: bytes = b""
    probs: bytes = b""


class Record:
    """One kind of record in one table. writer: the only side that writes it. watched: arrays of
    8-byte words, a row for each slot; a changed word means that the record has changed."""

    writer: ClassVar[Side]
    watched: Sequence[NDArray]

    def __init__(self, table: SpeculationTable):
        raise NotImplementedError

    def begin(self, slot: int, length: int) -> None:
        """Record that the other end has ``length`` tokens of the request now in this slot."""

    def news(self, slot: int, generation: int) -> Iterator[News | None]:
        """Yield this request's changes since the last call. None: the record is being written, so
        read it again later. Raises ``TooFarBehind``."""
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

    def __init__(self, table: SpeculationTable):
        self._k, self._tail = table.shape.k, table.shape.tail
        self._reader, self._writer = OutcomeReader(table), OutcomeWriter(table)
        records = table.slots["outcome"]
        self._stamps = records["stamp"]
        self.watched = self._stamps, records["drafts_stamp"]
        self._told = [(0, 0)] * table.shape.slots  # sent stamps of outcome and draft tokens
        self._lengths = [0] * table.shape.slots

    def begin(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def news(self, slot: int, generation: int) -> Iterator[News | None]:
        stamp = max(self._stamps.item(slot, 0), self._stamps.item(slot, 1))
        if stamp >> 32 != generation:
            return
        outcome_told, drafts_told = self._told[slot]
        if stamp != outcome_told:
            known = self._lengths[slot]
            outcome = self._reader.read(slot, stamp, known)
            if outcome is None:
                yield None
                return
            if not outcome.new_tokens:
                raise TooFarBehind
            self._told[slot], self._lengths[slot] = (stamp, drafts_told), outcome.length
            yield News(stamp, known, pack([outcome.accepted]), pack(outcome.new_tokens))
        if stamp != drafts_told:
            drafts = self._reader.read_drafts(slot, stamp)
            if drafts is not None:
                self._told[slot] = stamp, stamp
                yield News(stamp, tokens=pack(drafts))

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

    def __init__(self, table: SpeculationTable):
        self._words = table.slots["state"]
        self.watched = (self._words,)
        self._told = [0] * table.shape.slots

    def news(self, slot: int, generation: int) -> Iterator[News | None]:
        word = self._words.item(slot)
        if word != self._told[slot] and word >> 32 == generation:
            self._told[slot] = word
            yield News(word)

    def write(self, changed: Changed) -> None:
        self._words[changed.slot] = changed.stamp


class Fallback(Record):
    """Draft tokens for an outcome that was not predicted, a record for each parity. They arrive a
    few steps at a time. tokens: those after the known ones, ordered by step, then branch; a
    fallback has one branch. probs: ``pack_probs`` of each token's distribution. head: the rest of
    the record but for ``token_probs``, sent only while no tokens are known."""

    writer = Side.DRAFT
    name = "fallback"

    def __init__(self, table: SpeculationTable):
        shape, self._records = table.shape, table.slots[self.name]
        self._k, self._branches, self._top_m = shape.k, shape.branches, shape.top_m
        self._stamps, self._depths = self._records["stamp"], self._records["depth"]
        self.watched = self._stamps, self._depths
        sizes = shape.slots, 2, -1, shape.k
        self._tokens = self._records["tokens"].reshape(sizes)
        self._probs: NDArray[np.int64] | None = None
        if shape.top_m:
            self._probs = self._records["draft_probs"].reshape(*sizes, shape.top_m)
        self._told = [[(0, 0, 1)] * 2 for _ in range(shape.slots)]  # sent stamp, depth, branches

    def news(self, slot: int, generation: int) -> Iterator[News | None]:
        for parity in (0, 1):
            at = slot, parity
            stamp, depth = self._stamps.item(at), min(self._depths.item(at), self._k)
            told_stamp, known, branches = self._told[slot][parity]
            if stamp >> 32 != generation or (stamp, depth) == (told_stamp, known):
                continue
            known = known if stamp == told_stamp and depth > known else 0  # 0: a new record
            head = tokens = probs = b""
            if not known:
                head, branches = self._head(at)
            if depth > known:
                new = *at, slice(branches), slice(known, depth)
                tokens = self._tokens[new].T.tobytes()
                if self._probs is not None:
                    probs = pack_probs(self._probs[new].swapaxes(0, 1).reshape(-1, self._top_m))
            if self._stamps.item(at) != stamp:
                yield None
                continue
            self._told[slot][parity] = stamp, depth, branches
            yield News(stamp, known, head, tokens, probs)

    def write(self, changed: Changed) -> None:
        stamp, known = changed.stamp, changed.known
        at = changed.slot, stamp & 1
        there = self._stamps.item(at)
        if there > stamp or (known and (there != stamp or self._depths.item(at) != known)):
            return  # this end has a newer record, or has withdrawn this one
        head = changed.head if not known else self._head(at)[0]
        branches = self._branches_of(head)
        tokens = int32s(changed.tokens, self._k * branches)
        steps = len(tokens) // max(branches, 1)
        if len(tokens) != steps * branches or known + steps > self._k:
            raise Malformed(f"{len(tokens)} tokens for {branches} branches of {known}")
        probs = unpack_probs(changed.probs, len(tokens), self._top_m) if self._top_m else None
        if not known:
            self._stamps[at] = 0
            self._begin(at, head)
        new = *at, slice(branches), slice(known, known + steps)
        self._tokens[new] = tokens.reshape(steps, branches).T
        if self._probs is not None and probs is not None:
            self._probs[new] = probs.reshape(steps, branches, self._top_m).swapaxes(0, 1)
        self._depths[at] = known + steps
        self._stamps[at] = stamp

    def _head(self, at: tuple[int, int]) -> tuple[bytes, int]:
        """The head of the record at (slot, parity), and its number of branches."""
        return b"", 1

    def _branches_of(self, head: bytes) -> int:
        """The number of branches that a head announces; raises ``Malformed``."""
        return 1

    def _begin(self, at: tuple[int, int], head: bytes) -> None:
        """Write the head's content to the record at (slot, parity)."""


class Prediction(Fallback):
    """Predicted outcomes of a round, with a branch each. head: number of tokens that each branch
    will have, then all accepted lengths, then all bonus tokens."""

    name = "prediction"

    def _head(self, at: tuple[int, int]) -> tuple[bytes, int]:
        record = self._records[at]
        count = min(max(int(record["count"]), 0), self._branches)
        steps = min(max(int(record["steps"]), 0), self._k)
        outcomes = record["accepted"][:count].tobytes() + record["bonus"][:count].tobytes()
        return pack([steps]) + outcomes, count

    def _branches_of(self, head: bytes) -> int:
        numbers = int32s(head, 1 + 2 * self._branches)
        if len(numbers) % 2 == 0 or not 0 <= numbers[0] <= self._k:
            raise Malformed("a prediction whose parts do not fit")
        return len(numbers) // 2

    def _begin(self, at: tuple[int, int], head: bytes) -> None:
        record, (steps, *outcomes) = self._records[at], int32s(head, len(head))
        record["steps"], record["count"] = steps, len(outcomes) // 2
        record["accepted"][: len(outcomes) // 2] = outcomes[: len(outcomes) // 2]
        record["bonus"][: len(outcomes) // 2] = outcomes[len(outcomes) // 2 :]


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
