"""The draft's reads and writes of the speculation table, with numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.table import LOST, SpeculationTable, make_stamp


@dataclass(frozen=True)
class Outcome:
    """A round's outcome as the target published it.

    length: tokens of the text including the bonus. new_tokens: its last tokens, from the length
    the reader asked for; None if the target's tail no longer reaches back that far.
    """

    stamp: np.uint64
    length: int
    accepted: int
    bonus: int
    new_tokens: list[int] | None


class DraftMailbox:
    """Typed access to the slots; every method touches one slot, polling touches all at once."""

    def __init__(self, table: SpeculationTable):
        self._tail_size = table.shape.tail
        self._k = table.shape.k
        self._outcome = table.slots["outcome"]
        self._stamps = table.slots["outcome"]["stamp"]
        self._tail = table.slots["tail"]
        self._state = table.slots["state"]
        self._prediction = table.slots["prediction"]
        self._answer = table.slots["answer"]

    def newest_stamps(self) -> NDArray[np.uint64]:
        """uint64 [slots]: the newest outcome of each slot, 0 where there is none."""
        return self._stamps.max(axis=1)

    def unknown(self) -> NDArray[np.uint64]:
        """uint64 [slots]: the generation of each slot's newest outcome, 0 where there is none and
        where the draft has spoken of this request or a later one."""
        generations = self.newest_stamps() >> np.uint64(32)
        spoken = self._state >> np.uint64(32)
        return np.where(generations > spoken, generations, np.uint64(0))

    def read_outcome(self, slot: int, stamp: np.uint64, known: int) -> Outcome | None:
        """The outcome with this stamp and the tokens after the first ``known`` of the text.

        None if the target has moved on meanwhile: the newest stamp is then another.
        """
        record = self._outcome[slot, int(stamp) & 1]
        length = int(record["length"])
        accepted, bonus = int(record["accepted"]), int(record["bonus"])
        new_tokens: list[int] | None = None
        # Half, since a newer outcome may be overwriting the oldest part of the tail right now.
        if 0 <= length - known <= self._tail_size // 2:
            positions = np.arange(known, length) % self._tail_size
            new_tokens = self._tail[slot][positions].tolist()
        if self._stamps[slot].max() != stamp:
            return None
        return Outcome(stamp, length, accepted, bonus, new_tokens)

    def read_drafts(self, slot: int, stamp: np.uint64) -> list[int] | None:
        """The drafts the target verifies after this outcome; None if it has not decided yet."""
        record = self._outcome[slot, int(stamp) & 1]
        if record["drafts_stamp"] != stamp:
            return None
        count = min(max(int(record["num_drafts"]), 0), self._k)
        drafts: list[int] = record["drafts"][:count].tolist()
        return drafts if record["drafts_stamp"] == stamp else None

    def branch_of(self, slot: int, stamp: np.uint64, accepted: int, bonus: int) -> int | None:
        """Which of the branches predicted for a round this outcome has made true, -1 for none of
        them; None if they have yet to be published."""
        record = self._prediction[slot, int(stamp) & 1]
        if record["stamp"] != stamp:
            return None
        count = int(record["count"])
        match = (record["accepted"][:count] == accepted) & (record["bonus"][:count] == bonus)
        return int(match.argmax()) if match.any() else -1

    def set_state(self, slot: int, generation: int, state: int) -> None:
        """Say what the draft does for a request: one of the states of ``table.py``."""
        self._state[slot] = make_stamp(generation, state)

    def publish_prediction(
        self, slot: int, stamp: np.uint64, accepted: Sequence[int], bonus: Sequence[int]
    ) -> None:
        """Predict the outcomes of round ``stamp``; their branches have depth 0 yet."""
        record = self._prediction[slot, int(stamp) & 1]
        record["stamp"] = 0
        record["depth"] = 0
        record["count"] = len(accepted)
        record["accepted"][: len(accepted)] = accepted
        record["bonus"][: len(bonus)] = bonus
        record["stamp"] = stamp

    def extend_prediction(
        self,
        slot: int,
        stamp: np.uint64,
        tokens: Sequence[int],
        entries: NDArray[np.int64] | None = None,
    ) -> None:
        """Add one token to every branch of the prediction, in the order of its outcomes. entries:
        [branches, top_m], what they were sampled from."""
        record = self._prediction[slot, int(stamp) & 1]
        assert record["stamp"] == stamp, "a prediction is extended by its publisher alone"
        depth = int(record["depth"])
        record["tokens"][: len(tokens), depth] = tokens
        if entries is not None:
            record["proposals"][: len(tokens), depth] = entries
        record["depth"] = depth + 1

    def publish_answer(
        self,
        slot: int,
        stamp: np.uint64,
        tokens: Sequence[int],
        known: int = 0,
        entries: NDArray[np.int64] | None = None,
    ) -> None:
        """Answer the outcome ``stamp`` with the drafts that follow the ``known`` published ones.
        entries: [len(tokens), top_m], what they were sampled from."""
        record = self._answer[slot, int(stamp) & 1]
        if not known:
            record["stamp"] = 0
        depth = known + len(tokens)
        record["tokens"][known:depth] = tokens
        if entries is not None:
            record["proposals"][known:depth] = entries
        record["depth"] = depth
        record["stamp"] = stamp

    def clear(self, slot: int) -> None:
        """Withdraw everything the draft published for a slot."""
        self._prediction[slot]["stamp"] = 0
        self._answer[slot]["stamp"] = 0

    def lose_all(self) -> None:
        """Withdraw everything that was published, and say of every request that its text is
        needed again."""
        latest = np.maximum(self.newest_stamps(), self._state) >> np.uint64(32)
        for slot in np.flatnonzero(latest):
            self.clear(slot)
            self.set_state(slot, int(latest[slot]), LOST)


@dataclass(frozen=True)
class Step:
    """One more token for every branch of a batch. slots: int64 [batch], -1 = publish nothing for
    this row; stamps: int64 [batch], of the outcomes; tokens: int64 [batch, branches]; number:
    int64 [1], steps before this one; entries: int64 [batch, branches, top_m], what the tokens were
    sampled from, None if they were not."""

    slots: torch.Tensor
    stamps: torch.Tensor
    tokens: torch.Tensor
    number: torch.Tensor
    entries: torch.Tensor | None


class Publisher(Protocol):
    """Publishes what programs computed."""

    def predict(
        self,
        slots: torch.Tensor,
        stamps: torch.Tensor,
        accepted: torch.Tensor,
        bonus: torch.Tensor,
    ) -> None:
        """Predict outcomes, int64 [batch, branches] each; their branches have depth 0 yet. slots,
        stamps: as in ``Step``."""

    def extend(self, step: Step) -> None:
        """Add a token to each branch of the predictions."""

    def answer(self, step: Step) -> None:
        """Add a token to the one branch that answers each outcome."""


class HostPublisher:
    """A ``Publisher`` that waits for the device and writes with numpy."""

    def __init__(self, mailbox: DraftMailbox):
        self._mailbox = mailbox

    def predict(
        self,
        slots: torch.Tensor,
        stamps: torch.Tensor,
        accepted: torch.Tensor,
        bonus: torch.Tensor,
    ) -> None:
        for row, slot, stamp in _real(slots, stamps):
            self._mailbox.publish_prediction(
                slot, stamp, accepted[row].tolist(), bonus[row].tolist()
            )

    def extend(self, step: Step) -> None:
        for row, slot, stamp in _real(step.slots, step.stamps):
            tokens, entries = _of_row(step, row)
            self._mailbox.extend_prediction(slot, stamp, tokens, entries)

    def answer(self, step: Step) -> None:
        for row, slot, stamp in _real(step.slots, step.stamps):
            tokens, entries = _of_row(step, row)
            self._mailbox.publish_answer(slot, stamp, tokens, int(step.number), entries)


def _real(slots: torch.Tensor, stamps: torch.Tensor) -> Iterator[tuple[int, int, np.uint64]]:
    """Row, slot and stamp of the rows that are not padding."""
    for row, (slot, stamp) in enumerate(zip(slots.tolist(), stamps.tolist())):
        if slot >= 0:
            yield row, slot, np.uint64(stamp)


def _of_row(step: Step, row: int) -> tuple[list[int], NDArray[np.int64] | None]:
    """The tokens of a row, and what they were sampled from."""
    entries = None if step.entries is None else step.entries[row].numpy(force=True)
    return step.tokens[row].tolist(), entries
