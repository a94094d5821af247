"""How the draft's programs publish what they computed: in batches of tensors. Each row may belong
to another table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_ssd.table.predictions import PredictionWriter
from vllm_ssd.table.speculation_table import SpeculationTable

if TYPE_CHECKING:  # a bridge works without torch
    import torch


@dataclass(frozen=True)
class PredictedOutcomes:
    """Predicted outcomes, whose branches have no tokens yet. where: int64 [batch], each row's place
    as ``Publisher.join`` returns it, 0 = publish nothing for this row; stamps: int64 [batch], with
    the mark of a fallback where the outcome has come; accepted, bonus: int64 [batch, branches]."""

    where: torch.Tensor
    stamps: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor


@dataclass(frozen=True)
class BranchTokens:
    """One more token for every branch of some trees. Rows are branches, and those of a tree follow
    each other.

    For each tree, int64 [trees], where, stamps: as in ``PredictedOutcomes``; first, count: its
    first row and number of rows. For each row, tokens: int64 [rows]; top_probs: float32 [rows], as
    the table has them; step: int64 [rows], the branch's tokens before this one; draft_probs: int64
    [rows, top_m], the distributions that the tokens were sampled from. ``first`` and ``count`` may
    have further entries.
    """

    where: torch.Tensor
    stamps: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    tokens: torch.Tensor
    top_probs: torch.Tensor
    step: torch.Tensor
    draft_probs: torch.Tensor


class Publisher(Protocol):
    """Publishes what programs computed, in the tables that have joined."""

    def join(self, table: SpeculationTable) -> range:
        """Publish in this table, too, from now on. Returns the place of each slot, by which rows
        name it in ``where``. Only this publisher knows what a place is."""

    def leave(self, table: SpeculationTable) -> None:
        """Stop publishing in this table. From now on no row may name it, and no program that has
        such a row may still run."""

    def predict(self, new: PredictedOutcomes) -> None:
        """Publish these outcomes, in place of earlier predictions for the same rounds."""

    def extend(self, new: BranchTokens) -> None:
        """Add a token to each branch of the predictions."""


class HostPublisher:
    """A ``Publisher`` that waits for the device and writes with numpy."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[PredictionWriter, int]] = {}  # by their places
        self._places: dict[SpeculationTable, range] = {}
        self._next = 1  # places are numbered in the order of joining

    def join(self, table: SpeculationTable) -> range:
        writer = PredictionWriter(table)
        places = range(self._next, self._next + table.shape.slots)
        self._slots |= {place: (writer, slot) for slot, place in enumerate(places)}
        self._places[table], self._next = places, places.stop
        return places

    def leave(self, table: SpeculationTable) -> None:
        for place in self._places.pop(table):
            del self._slots[place]

    def predict(self, new: PredictedOutcomes) -> None:
        for row, writer, slot, stamp in self._real(new):
            accepted, bonus = new.accepted[row].tolist(), new.bonus[row].tolist()
            writer.publish(slot, stamp, accepted, bonus)

    def extend(self, new: BranchTokens) -> None:
        firsts, counts = new.first.tolist(), new.count.tolist()
        for tree, writer, slot, stamp in self._real(new):
            first = firsts[tree]
            rows = slice(first, first + counts[tree])
            tokens, top_probs = new.tokens[rows].tolist(), new.top_probs[rows].numpy(force=True)
            draft_probs = new.draft_probs[rows].numpy(force=True)
            writer.extend(slot, stamp, tokens, draft_probs, top_probs)

    def _real(
        self, new: PredictedOutcomes | BranchTokens
    ) -> Iterator[tuple[int, PredictionWriter, int, np.uint64]]:
        """Row, table's writer, slot and stamp of the rows that are not padding."""
        for row, (where, stamp) in enumerate(zip(new.where.tolist(), new.stamps.tolist())):
            if where:
                yield row, *self._slots[where], np.uint64(stamp)
