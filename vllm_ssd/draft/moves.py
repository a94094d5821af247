"""Copies of keys and values within requests: drafts that were grown in a branch are verified."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ssd.draft.attention.base import PagedAttention
from vllm_ssd.draft.graphed_call import GraphedCall
from vllm_ssd.draft.inputs import Inputs

Move = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""A request's KV blocks, and pairs of its KV indices: from where to where."""


class Moves:
    """``load``, then ``run``: up to ``size`` copies, each over all layers."""

    def __init__(self, attention: PagedAttention, size: int):
        self._attention = attention
        self._nowhere = attention.padding_block * attention.block_size
        self._inputs = Inputs(attention.shape.device, {"sources": (size,), "targets": (size,)})
        self.run = GraphedCall(self._compute)

    def load(self, moves: Sequence[Move]) -> None:
        """Take in what to copy."""
        slot_of = self._attention.slot_of
        host = self._inputs.host
        for name, place in (("sources", 0), ("targets", 1)):
            slots = [slot_of(blocks, pair[place]) for blocks, pairs in moves for pair in pairs]
            host[name][: len(slots)] = slots
            host[name][len(slots) :] = self._nowhere
        self._inputs.send()

    def try_out(self, _: int) -> None:
        """Load nothing; a run takes as long."""
        self.load(())

    def _compute(self) -> None:
        inputs = self._inputs.device
        self._attention.move(inputs["sources"], inputs["targets"])
