"""The interface of the draft's attention: paged KV, causal chunks, and trees of branches.

A *plan* serves batches of one size. ``fill`` tells it where everything is, and the model's layers
then call ``attend``. A plan computes with memory that stays where it is. So a CUDA graph recorded
over the plan can be replayed after another fill.

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
    no value belongs to; empty if there are none. soft_cap: a logit x counts as soft_cap *
    tanh(x / soft_cap); 0 = as x. The other fields are equal in all layers, too."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int, ...] = ()
    soft_cap: float = 0.0
    sinks: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    @property
    def group(self) -> int:
        """Query heads that share their KV."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int:
        """The number of last positions that a layer sees, 0 = all."""
        return self.windows[layer] if self.windows else 0

    def bytes_per_token(self) -> int:
        """Bytes of KV memory of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedAttention:
    """Owns the KV memory: per layer, keys and values of shape [num_blocks + 1, block_size, H_kv,
    D]. Padding writes to the last block. max_len: the longest KV of a request."""

    chunks: type[ChunkPlan]
    trees: type[TreePlan]
    """The classes of its plans."""

    graphs = False
    """Whether CUDA graphs may be recorded over the plans."""

    narrowest = crowded = 4
    """Branches of the narrowest trees that a plan for trees should be full of. crowded: those of a
    plan for more than 256 rows."""

    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int, max_len: int):
        self.shape = shape
        self.block_size = block_size
        self.max_len = max_len
        self.padding_block = num_blocks
        self.padding_slot = num_blocks * block_size
        size = (num_blocks + 1, block_size, shape.num_kv_heads, shape.head_dim)
        self._kv = torch.zeros(shape.num_layers, 2, *size, dtype=shape.dtype, device=shape.device)
        self.keys = [layer[0] for layer in self._kv]
        self.values = [layer[1] for layer in self._kv]
        self._one = torch.ones(1, dtype=torch.float32, device=shape.device)
        self.plan: Plan  # the one that the layers follow

    def chunk_plan(self, batch: int, queries: int) -> ChunkPlan:
        """A plan for up to ``batch`` chunks of up to ``queries`` tokens, causal in each request."""
        return self.chunks(self, batch, queries)

    def tree_plan(self, rows: int, steps: int, tile: int = 0) -> TreePlan:
        """A plan for trees that have up to ``rows`` branches together, and take ``steps`` steps.
        tile: from ``tile``, 0 = for trees of any width."""
        return self.trees(self, rows, steps, tile or self.tile(rows, rows))

    def tile(self, rows: int, widest: int) -> int:
        """Branches that a plan for ``rows`` attends together: those of a tree take whole tiles.
        widest: branches of the widest tree."""
        return rows

    def most_tiles(self, rows: int, tile: int) -> int:
        """The most tiles of a plan for trees with up to ``rows`` branches: enough for many narrow
        trees, or for one."""
        narrowest = self.narrowest if rows <= 256 else min(self.narrowest, self.crowded)
        return max(-(-rows // min(tile, narrowest)), min(rows, 4))

    def fitting(self, rows: int, branches: Sequence[int]) -> int:
        """How many trees with these numbers of branches, the first ones, fit a plan for ``rows``;
        at least one if it has no more branches than that."""
        tile = self.tile(rows, max(branches, default=1))
        free = self.most_tiles(rows, tile)
        for number, own in enumerate(branches):
            rows, free = rows - own, free - -(-own // tile)
            if rows < 0 or free < 0:
                return number
        return len(branches)

    def plant(
        self,
        blocks: Sequence[Sequence[int]],
        linear: Sequence[int],
        parents: NDArray[np.int64],
        steps: int,
    ) -> list[Tree]:
        """Trees of several requests. blocks, linear: KV blocks and linear length of each; parents:
        int64 [requests, branches]; steps: that the branches will take."""
        requests, branches = parents.shape
        index = np.array([linear]).T + np.arange(steps * branches)
        slots = self.slots_of(blocks, index).reshape(requests, steps, branches)
        return [Tree(*each) for each in zip(blocks, linear, parents, slots)]

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
    """Attention for batches of one size. attention: owns the KV. positions: int64 [tokens], in
    their texts; slots: int64 [tokens], where the tokens' keys and values go."""

    positions: torch.Tensor
    slots: torch.Tensor

    def __init__(self, attention: PagedAttention):
        self.attention = attention

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the tokens' keys and values, then attend.

        query: [tokens, H, D]; key, value: [tokens, H_kv, D]; returns the query's shape.
        """
        self.attention.write(layer, self.slots, key, value)
        return self.look(layer, query)

    @abstractmethod
    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend; the tokens' keys and values are written already. Returns the query's shape."""


class ChunkPlan(Plan):
    """A plan for up to ``batch`` chunks of up to ``queries`` tokens: ``fill``, then the model's
    forward."""

    def __init__(self, attention: PagedAttention, batch: int, queries: int):
        super().__init__(attention)
        self.batch, self.queries = batch, queries
        shape = (batch, queries)
        self.inputs = Inputs(
            attention.shape.device, {"slots": shape, "positions": shape, "contexts": (batch,)}
        )
        self.slots = self.inputs.device["slots"].view(-1)
        self.positions = self.inputs.device["positions"].view(-1)

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Take in where the chunks' KV is; tokens beyond a chunk's end are padding."""
        host, attention = self.inputs.host, self.attention
        host["slots"][:] = attention.padding_slot
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
    """A plan for trees that have up to ``rows`` branches together. A row is a branch. Every tree
    has a step of its own. Call ``fill`` when trees come or go. For every step, call ``prepare``,
    the model's forward, and ``next_step``.

    tile: branches that are attended together. tiles: the most tiles, and so the most trees. steps:
    those that a tree takes. step: int64 [rows], each row's own.
    """

    def __init__(self, attention: PagedAttention, rows: int, steps: int, tile: int):
        super().__init__(attention)
        device = attention.shape.device
        self.rows, self.steps, self.tile = rows, steps, tile
        self.tiles = attention.most_tiles(rows, tile)
        of_rows = dict.fromkeys(("parent", "branch", "tree", "step"), (rows,))
        # Rows of padding are those of one more tree.
        of_trees = dict.fromkeys(("linear", "width", "kv_len", "first"), (self.tiles + 1,))
        self.inputs = Inputs(device, {"step_slots": (steps, rows), **of_rows, **of_trees})
        self.step = self.inputs.device["step"]
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.slots)

    def fill(self, trees: Sequence[Tree], steps: Sequence[int]) -> None:
        """Take in where the trees' KV is, and how many steps each has taken. The rows of the trees
        follow each other, and then padding."""
        host = self.inputs.host
        counts = [tree.branches for tree in trees]
        used, count = sum(counts), len(trees)
        widths = [*counts, max(self.rows - used, 1)]
        first = [0, *accumulate(counts)]
        tree = np.repeat(np.arange(count + 1), widths)[: self.rows]
        host["branch"][:] = np.arange(self.rows) - np.array(first)[tree]
        host["tree"][:used], host["tree"][used:] = tree[:used], self.tiles
        host["width"][:count], host["width"][self.tiles] = counts, widths[-1]
        host["first"][:count], host["first"][self.tiles] = first[:-1], used
        host["linear"][:count], host["linear"][self.tiles] = [t.linear_len for t in trees], 1
        host["kv_len"][:count], host["kv_len"][self.tiles] = [t.kv_len for t in trees], 1
        host["step_slots"][:, used:] = self.attention.padding_slot
        host["parent"][used:], host["step"][used:] = 1, 0
        if trees:
            np.concatenate([t.slots for t in trees], axis=1, out=host["step_slots"][:, :used])
            np.concatenate([t.parents for t in trees], out=host["parent"][:used])
            host["step"][:used] = np.repeat(steps, counts)
        self.inputs.send()

    def prepare(self) -> None:
        """Set slots, positions and masks for each row's step, on the device."""
        inputs = self.inputs.device
        step = self.step.unsqueeze(0)
        torch.gather(inputs["step_slots"], 0, step, out=self.slots.unsqueeze(0))
        torch.add(inputs["parent"], self.step, out=self.positions)

    def next_step(self) -> None:
        """Every tree has taken a step."""
        self.step += 1
