"""How the draft's programs publish what they computed: as batches of tensors, each row of which may
belong to another table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.table.predictions import PredictionWriter
from vllm_ssd.table.speculation_table import SpeculationTable

if TYPE_CHECKING:  # a relay works without torch
    import torch


def places(table: SpeculationTable) -> range:
    """By slot, where a row for it publishes: the address of the slot's predictions, behind which
    its fallbacks are. Tables that differ in slots and tail only are alike from there on. A GPU has
    the same addresses, once the pages are registered with it."""
    predictions = table.slots["prediction"]
    first, size = predictions.ctypes.data, predictions.strides[0]
    return range(first, first + table.shape.slots * size, size)


@dataclass(frozen=True)
class Outcomes:
    """Predicted outcomes, whose branches have no tokens yet. where: int64 [batch], of ``places``,
    0 = publish nothing for this row; stamps: int64 [batch]; steps: int64 [batch], tokens that each
    branch will have; accepted, bonus: int64 [batch, branches]."""

    where: torch.Tensor
    stamps: torch.Tensor
    steps: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor


@dataclass(frozen=True)
class BranchTokens:
    """One more token for every branch of a batch. where, stamps: as of its outcomes; tokens: int64
    [batch, branches]; step: int64 [1], tokens of each branch before these; draft_probs: int64
    [batch, branches, top_m], what the tokens were sampled from, None if they were not."""

    where: torch.Tensor
    stamps: torch.Tensor
    tokens: torch.Tensor
    step: torch.Tensor
    draft_probs: torch.Tensor | None


class Publisher(Protocol):
    """Publishes what programs computed, in the tables that have joined."""

    def join(self, table: SpeculationTable) -> None:
        """Publish in this table, too, from now on."""

    def leave(self, table: SpeculationTable) -> None:
        """Publish in it no longer. No row may name it, nor may a program still be at work that had
        one which did."""

    def predict(self, new: Outcomes) -> None:
        """Predict these, in place of what was predicted for the same round."""

    def extend(self, new: BranchTokens) -> None:
        """Add a token to each branch of the predictions."""

    def fallback(self, new: BranchTokens) -> None:
        """Add a token to the one branch of each fallback."""


class HostPublisher:
    """A ``Publisher`` that waits for the device and writes with numpy."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[PredictionWriter, int]] = {}  # by their places

    def join(self, table: SpeculationTable) -> None:
        writer = PredictionWriter(table)
        self._slots |= {place: (writer, slot) for slot, place in enumerate(places(table))}

    def leave(self, table: SpeculationTable) -> None:
        for place in places(table):
            del self._slots[place]

    def predict(self, new: Outcomes) -> None:
        for row, writer, slot, stamp in self._real(new):
            accepted, bonus = new.accepted[row].tolist(), new.bonus[row].tolist()
            writer.publish(slot, stamp, accepted, bonus, int(new.steps[row]))

    def extend(self, new: BranchTokens) -> None:
        for row, writer, slot, stamp in self._real(new):
            tokens, draft_probs = _of_row(new, row)
            writer.extend(slot, stamp, tokens, draft_probs)

    def fallback(self, new: BranchTokens) -> None:
        for row, writer, slot, stamp in self._real(new):
            tokens, draft_probs = _of_row(new, row)
            writer.publish_fallback(slot, stamp, tokens, int(new.step), draft_probs)

    def _real(
        self, new: Outcomes | BranchTokens
    ) -> Iterator[tuple[int, PredictionWriter, int, np.uint64]]:
        """Row, table's writer, slot and stamp of the rows that are not padding."""
        for row, (where, stamp) in enumerate(zip(new.where.tolist(), new.stamps.tolist())):
            if where:
                yield row, *self._slots[where], np.uint64(stamp)


def _of_row(new: BranchTokens, row: int) -> tuple[list[int], NDArray[np.int64] | None]:
    """The tokens of a row, and what they were sampled from."""
    draft_probs = None if new.draft_probs is None else new.draft_probs[row].numpy(force=True)
    return new.tokens[row].tolist(), draft_probs
