"""A kind of record of a speculation table: which side writes it, by what its changes are seen, and
how it crosses to the table on the other node.

``news`` reads a record as everybody reads it, stamp, body, stamp again. ``write`` writes it as its
own side does, by that side's end of the record, body first and stamp last; what does not fit the
table is refused as ``Malformed`` before anything is written. Tokens and distributions are not
looked at: whoever reads a table checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import ClassVar, Union

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.protocol import SpeculationTable
from vllm_ssd.protocol.outcomes import OutcomeReader, OutcomeWriter
from vllm_ssd.relay.frames import Changed, Malformed
from vllm_ssd.relay.packing import int32s, pack


class Side(Enum):
    """Of a table."""

    TARGET, DRAFT = range(2)


class TooFarBehind(Exception):
    """What is new of a text can no longer be read: the target has to send it again."""


# None: the record is being written, and is to be looked at again.
News = Iterator[Union[Changed, None]]


class Record:
    """A kind, in one table. writer: the only side that writes it; fields: those of a slot whose
    change is news, with the record that they are in; none for a record of the whole table."""

    writer: ClassVar[Side]
    fields: ClassVar[Sequence[tuple[str, ...]]] = ()

    def __init__(self, table: SpeculationTable, session: int, number: int):
        """number: of the kind, in frames."""
        self._shape, self._kind = table.shape, (session, number)  # how frames begin

    def begin(self, slot: int, length: int) -> None:
        """The other end has a text of ``length`` tokens of the request that has this slot now."""

    def news(self, slot: int, generation: int) -> News:
        """What has changed since the last call, if it is this request's."""
        raise NotImplementedError

    def write(self, changed: Changed) -> None:
        """News of the other end, whose slot and request there are; raises ``Malformed``."""
        raise NotImplementedError


class Outcome(Record):
    """The newest outcome of a text. head: accepted drafts, -1 if the tokens are of several rounds;
    tokens: those of the text after the known ones. Without a head, the tokens are the drafts that
    are verified in the round after it."""

    writer = Side.TARGET
    fields = (("outcome", "stamp"), ("outcome", "drafts_stamp"))

    def __init__(self, table: SpeculationTable, session: int, number: int):
        super().__init__(table, session, number)
        self._reader, self._writer = OutcomeReader(table), OutcomeWriter(table)
        self._stamps = table.slots["outcome"]["stamp"]
        self._told = [(0, 0)] * table.shape.slots  # stamps: of outcome and drafts
        self._lengths = [0] * table.shape.slots

    def begin(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def news(self, slot: int, generation: int) -> News:
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
            head, tokens = pack([outcome.accepted]), pack(outcome.new_tokens)
            yield Changed(*self._kind, slot, stamp, known, head, tokens)
        if stamp != drafts_told:
            drafts = self._reader.read_drafts(slot, stamp)
            if drafts is not None:
                self._told[slot] = stamp, stamp
                yield Changed(*self._kind, slot, stamp, tokens=pack(drafts))

    def write(self, changed: Changed) -> None:
        slot, stamp = changed.slot, np.uint64(changed.stamp)
        if not changed.head:
            drafts = int32s(changed.tokens, self._shape.k)
            self._writer.confirm(slot, stamp, drafts.tolist())
            return
        head = int32s(changed.head, 1).tolist()
        tokens = int32s(changed.tokens, self._shape.tail).tolist()
        if not tokens or not -1 <= head[0] <= self._shape.k:
            raise Malformed(f"{len(tokens)} new tokens with {head[0]} accepted drafts")
        self._writer.publish(slot, stamp, changed.known + len(tokens), head[0], tokens)


class Word(Record):
    """A single word, for a stamp."""

    def __init__(self, table: SpeculationTable, session: int, number: int):
        super().__init__(table, session, number)
        self._words = self._find(table)
        self._told = [0] * len(self._words)

    def _find(self, table: SpeculationTable) -> NDArray:
        raise NotImplementedError

    def news(self, slot: int, generation: int) -> News:
        word = self._words.item(slot)
        if word != self._told[slot] and word >> 32 == generation:
            self._told[slot] = word
            yield Changed(*self._kind, slot, word)

    def write(self, changed: Changed) -> None:
        self._words[changed.slot] = changed.stamp


class State(Word):
    """The draft's state for the request, as it is stored."""

    writer = Side.DRAFT
    fields = (("state",),)

    def _find(self, table: SpeculationTable) -> NDArray:
        return table.slots["state"]


class Plan(Word):
    """Of the whole table, and so of slot and generation 0: whether the target does without drafts,
    0 or 1."""

    writer = Side.TARGET

    def _find(self, table: SpeculationTable) -> NDArray:
        return table.plan["undrafted"]

    def write(self, changed: Changed) -> None:
        if changed.slot or changed.stamp > 1:
            raise Malformed(f"a plan of {changed.stamp}")
        super().write(changed)
