"""The interface of the draft's attention: paged KV, causal chunks, and trees of branches.

A *plan* serves batches of one shape: a number of requests and of queries each. ``fill`` tells it
where everything is, and the model's layers then call ``attend``. A plan computes with memory that
stays where it is. So a CUDA graph recorded over the plan can be replayed after another fill.

Batches smaller than their plan are padded. Padding writes to a block that belongs to no request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.inputs import Inputs


@dataclass(frozen=True)
class AttentionShape:
    """One model's attention. windows: for each layer, how many of the last positions it sees, 0 =
    all; empty if all layers see all. sinks: for each layer [num_heads], the logit of each head that
    no value belongs to; empty if there are none. The other fields are equal in all layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int, ...] = ()
    sinks: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    def window(self, layer: int) -> int:
        """The number of last positions that a layer sees, 0 = all."""
        return self.windows[layer] if self.windows else 0

    def bytes_per_token(self) -> int:
        """Bytes of KV memory of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedAttention(ABC):
    """Owns the KV memory: per layer, keys and values of shape [num_blocks + 1, block_size, H_kv,
    D]. Padding writes to the last block. max_len: the longest KV of a request."""

    graphs = False
    """Whether CUDA graphs may be recorded over the plans."""

    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int, max_len: int):
        self.shape = shape
        self.block_size = block_size
        self.max_len = max_len
        self.padding_block = num_blocks
        size = (num_blocks + 1, block_size, shape.num_kv_heads, shape.head_dim)
        self._kv = torch.zeros(shape.num_layers, 2, *size, dtype=shape.dtype, device=shape.device)
        self.keys = [layer[0] for layer in self._kv]
        self.values = [layer[1] for layer in self._kv]
        self._one = torch.ones(1, dtype=torch.float32, device=shape.device)
        self.plan: Plan  # the one that the layers follow

    @abstractmethod
    def chunk_plan(self, batch: int, queries: int) -> ChunkPlan:
        """A plan for up to ``batch`` chunks of up to ``queries`` tokens, causal in each request."""

    @abstractmethod
    def tree_plan(self, batch: int, branches: int, steps: int) -> TreePlan:
        """A plan for up to ``batch`` trees of ``branches`` branches that take ``steps`` steps."""

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put keys and values, [tokens, H_kv, D], into int64 [tokens] slots of a layer."""
        keys, values = self.keys[layer], self.values[layer]
        if key.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash

            reshape_and_cache_flash(key, value, keys, values, slots, "auto", self._one, self._one)
        else:
            keys.view(-1, *key.shape[1:]).index_copy_(0, slots, key)
            values.view(-1, *value.shape[1:]).index_copy_(0, slots, value)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the keys and values of all layers from int64 [n] slots to others."""
        kv = self._kv.view(2 * self.shape.num_layers, -1, *self._kv.shape[-2:])
        kv.index_copy_(1, targets, kv.index_select(1, sources))

    def slots_of(
        self, blocks: Sequence[Sequence[int]], index: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Slots, int64 [rows, n], of KV indices, int64 [rows, n], that never descend in a row.
        blocks: the KV blocks of each row's request."""
        pages, offsets = np.divmod(index, self.block_size)
        firsts = pages[:, 0].tolist()
        needed = [
            own[first : last + 1] for own, first, last in zip(blocks, firsts, pages[:, -1].tolist())
        ]
        # The needed blocks of all rows, one row after the other, and where each row's begin.
        table = np.fromiter(chain.from_iterable(needed), np.int64)
        begins = np.array([0, *accumulate(map(len, needed))][:-1]) - firsts
        return table[pages + begins[:, None]] * self.block_size + offsets


class Plan(ABC):
    """Attention for batches of one shape. attention: owns the KV. batch, queries: the shape. slots:
    int64 [batch * queries], where the tokens' keys and values go."""

    slots: torch.Tensor

    def __init__(self, attention: PagedAttention, batch: int, queries: int):
        self.attention = attention
        self.batch = batch
        self.queries = queries

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the tokens' keys and values, then attend.

        query: [batch * queries, H, D]; key, value: [.., H_kv, D]; returns the query's shape.
        """
        self.attention.write(layer, self.slots, key, value)
        return self.look(layer, query)

    @abstractmethod
    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend; the tokens' keys and values are written already. Returns the query's shape."""


class ChunkPlan(Plan):
    """A plan for chunks: ``fill``, then the model's forward. positions: int64 [batch * queries]."""

    def __init__(self, attention: PagedAttention, batch: int, queries: int):
        super().__init__(attention, batch, queries)
        shape = (batch, queries)
        self.inputs = Inputs(
            attention.shape.device, {"slots": shape, "positions": shape, "contexts": (batch,)}
        )
        self.slots = self.inputs.device["slots"].view(-1)
        self.positions = self.inputs.device["positions"].view(-1)

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Take in where the chunks' KV is; tokens beyond a chunk's end are padding."""
        host, attention = self.inputs.host, self.attention
        host["slots"][:] = attention.padding_block * attention.block_size
        host["positions"][:] = 0
        host["contexts"][:] = 0
        if chunks:
            blocks, contexts, lengths = zip(*chunks)
            rows, begin, length = len(chunks), np.array([contexts]).T, np.array([lengths]).T
            query = np.arange(self.queries)
            real = query < length
            # A query beyond a chunk's end is looked up as the chunk's last token.
            index = begin + np.minimum(query, length - 1)
            np.copyto(host["slots"][:rows], attention.slots_of(blocks, index), where=real)
            np.copyto(host["positions"][:rows], index, where=real)
            host["contexts"][:rows] = contexts
        self.inputs.send()


class TreePlan(Plan):
    """A plan for trees: ``fill`` once; then, for every step, ``prepare`` and the model's forward.

    positions: int64 [batch * branches], of the step that was prepared.
    """

    def __init__(self, attention: PagedAttention, batch: int, branches: int, steps: int):
        super().__init__(attention, batch, branches)
        device = attention.shape.device
        self.steps = steps
        self.inputs = Inputs(
            device,
            {
                "step_slots": (steps, batch, branches),
                "parents": (batch, branches),
                "linear": (batch,),
                "kv_len": (batch,),
            },
        )
        self.slots = torch.zeros(batch * branches, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.slots)

    def fill(self, trees: Sequence[Tree | None]) -> None:
        """Take in where the trees' KV is. None: a row of padding."""
        host, attention = self.inputs.host, self.attention
        host["step_slots"][:] = attention.padding_block * attention.block_size
        host["parents"][:], host["linear"][:], host["kv_len"][:] = 1, 1, 1
        planted = [row for row, tree in enumerate(trees) if tree is not None]
        if planted:
            blocks, linear, parents, _ = zip(*filter(None, trees))
            size = self.steps * self.queries
            slots = attention.slots_of(blocks, np.array([linear]).T + np.arange(size))
            by_step = slots.reshape(len(planted), self.steps, self.queries).swapaxes(0, 1)
            # A slice is filled in half the time.
            rows = slice(len(trees)) if len(planted) == len(trees) else planted
            host["step_slots"][:, rows] = by_step
            host["parents"][rows], host["linear"][rows] = parents, linear
            host["kv_len"][rows] = [length + size for length in linear]
        self.inputs.send()

    def prepare(self, step: torch.Tensor) -> None:
        """Set slots, positions and masks for step int64 [1] on the device."""
        inputs = self.inputs.device
        slots = inputs["step_slots"].view(self.steps, -1)
        torch.index_select(slots, 0, step, out=self.slots.unsqueeze(0))
        torch.add(inputs["parents"].view(-1), step, out=self.positions)
