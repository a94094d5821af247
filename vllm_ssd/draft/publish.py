"""The draft's reads and writes of the speculation table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.table import SpeculationTable, make_stamp


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

    def extend_prediction(self, slot: int, stamp: np.uint64, tokens: Sequence[int]) -> None:
        """Add one token to every branch of the prediction, in the order of its outcomes."""
        record = self._prediction[slot, int(stamp) & 1]
        assert record["stamp"] == stamp, "a prediction is extended by its publisher alone"
        depth = int(record["depth"])
        record["tokens"][: len(tokens), depth] = tokens
        record["depth"] = depth + 1

    def publish_answer(self, slot: int, stamp: np.uint64, tokens: Sequence[int]) -> None:
        """Answer the outcome ``stamp`` with all drafts so far; called again as they grow."""
        record = self._answer[slot, int(stamp) & 1]
        if record["stamp"] != stamp:
            record["stamp"] = 0
            record["depth"] = 0
            record["tokens"][: len(tokens)] = tokens
            record["depth"] = len(tokens)
            record["stamp"] = stamp
        else:
            depth = int(record["depth"])
            record["tokens"][depth : len(tokens)] = tokens[depth:]
            record["depth"] = len(tokens)

    def clear(self, slot: int) -> None:
        """Withdraw everything the draft published for a slot."""
        self._prediction[slot]["stamp"] = 0
        self._answer[slot]["stamp"] = 0
