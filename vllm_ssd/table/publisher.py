"""How the draft's programs publish what they computed: as batches of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.table.predictions import PredictionWriter


@dataclass(frozen=True)
class Outcomes:
    """Predicted outcomes, whose branches have no tokens yet. slots: int64 [batch], -1 = publish
    nothing for this row; stamps: int64 [batch]; steps: int64 [batch], tokens that each branch will
    have; accepted, bonus: int64 [batch, branches]."""

    slots: torch.Tensor
    stamps: torch.Tensor
    steps: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor


@dataclass(frozen=True)
class BranchTokens:
    """One more token for every branch of a batch. slots, stamps: as of its outcomes; tokens: int64
    [batch, branches]; step: int64 [1], tokens of each branch before these; draft_probs: int64
    [batch, branches, top_m], what the tokens were sampled from, None if they were not."""

    slots: torch.Tensor
    stamps: torch.Tensor
    tokens: torch.Tensor
    step: torch.Tensor
    draft_probs: torch.Tensor | None


class Publisher(Protocol):
    """Publishes what programs computed."""

    def predict(self, new: Outcomes) -> None:
        """Predict these, in place of what was predicted for the same round."""

    def extend(self, new: BranchTokens) -> None:
        """Add a token to each branch of the predictions."""

    def fallback(self, new: BranchTokens) -> None:
        """Add a token to the one branch of each fallback."""


class HostPublisher:
    """A ``Publisher`` that waits for the device and writes with numpy."""

    def __init__(self, writer: PredictionWriter):
        self._writer = writer

    def predict(self, new: Outcomes) -> None:
        for row, slot, stamp in _real(new):
            accepted, bonus = new.accepted[row].tolist(), new.bonus[row].tolist()
            self._writer.publish(slot, stamp, accepted, bonus, int(new.steps[row]))

    def extend(self, new: BranchTokens) -> None:
        for row, slot, stamp in _real(new):
            tokens, draft_probs = _of_row(new, row)
            self._writer.extend(slot, stamp, tokens, draft_probs)

    def fallback(self, new: BranchTokens) -> None:
        for row, slot, stamp in _real(new):
            tokens, draft_probs = _of_row(new, row)
            self._writer.publish_fallback(slot, stamp, tokens, int(new.step), draft_probs)


def _real(new: Outcomes | BranchTokens) -> Iterator[tuple[int, int, np.uint64]]:
    """Row, slot and stamp of the rows that are not padding."""
    for row, (slot, stamp) in enumerate(zip(new.slots.tolist(), new.stamps.tolist())):
        if slot >= 0:
            yield row, slot, np.uint64(stamp)


def _of_row(new: BranchTokens, row: int) -> tuple[list[int], NDArray[np.int64] | None]:
    """The tokens of a row, and what they were sampled from."""
    draft_probs = None if new.draft_probs is None else new.draft_probs[row].numpy(force=True)
    return new.tokens[row].tolist(), draft_probs
