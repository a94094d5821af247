"""Copies of keys and values within requests, for drafts that were grown in a branch and are
verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm_ssd.draft.attention.base import PagedAttention
from vllm_ssd.draft.inputs import Inputs
from vllm_ssd.draft.program import Program


class Move(NamedTuple):
    """blocks: a request's KV blocks; sources, targets: KV indices in them, equally many."""

    blocks: Sequence[int]
    sources: range
    targets: range


class Moves(Program):
    """Makes up to ``size`` copies, each over all layers: ``fill``, then ``run``."""

    def __init__(self, attention: PagedAttention, size: int):
        self._attention = attention
        self._inputs = Inputs(attention.shape.device, {"sources": (size,), "targets": (size,)})

    def fill(self, moves: Sequence[Move]) -> None:
        """Take in what to copy."""
        sources, targets = self._inputs.host["sources"], self._inputs.host["targets"]
        sources[:] = targets[:] = self._attention.padding_slot
        count = sum(len(move.targets) for move in moves)
        sources[:count] = self._slots((move.blocks, move.sources) for move in moves)
        targets[:count] = self._slots((move.blocks, move.targets) for move in moves)
        self._inputs.send()

    def _slots(self, indices: Iterable[tuple[Sequence[int], range]]) -> list[int]:
        """The slots of KV indices in these blocks. For so few, this is faster than numpy."""
        size = self._attention.block_size
        return [
            blocks[index // size] * size + index % size for blocks, own in indices for index in own
        ]

    def try_out(self, _: int) -> None:
        """Fill in no copies; a run takes the same time."""
        self.fill(())

    def _compute(self) -> None:
        inputs = self._inputs.device
        self._attention.move(inputs["sources"], inputs["targets"])
