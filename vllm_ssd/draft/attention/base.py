"""What the draft's attention must do: paged KV, causal chunks, and trees of branches.

A backend is planned once for a batch (``plan_chunks``, or ``plan_trees`` and then ``tree_step``
for each step); the model's layers then call ``attend``. Logical KV indices are turned into slots
here, the same way for every backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_ssd.draft.attention.masks import Chunk, Tree


@dataclass(frozen=True)
class AttentionShape:
    """One model's attention: the same in all layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device

    def bytes_per_token(self) -> int:
        """KV memory of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedAttention(ABC):
    """Owns the KV memory: per layer, keys and values of shape [num_blocks, block_size, H_kv, D]."""

    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int):
        self.shape = shape
        self.block_size = block_size
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        layers = range(shape.num_layers)
        self.keys = [torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        flat = (-1, shape.num_kv_heads, shape.head_dim)
        self.flat_keys = [keys.view(flat) for keys in self.keys]
        self.flat_values = [values.view(flat) for values in self.values]

    @abstractmethod
    def plan_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Prepare for tokens of ``chunks``, flattened in order; causal within each request."""

    @abstractmethod
    def plan_trees(self, trees: Sequence[Tree]) -> None:
        """Prepare for all steps of ``trees``: one token a branch a step, flattened in order."""

    @abstractmethod
    def tree_step(self, step: int) -> None:
        """Prepare step 0.. of the planned trees; steps run in order."""

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the tokens' keys and values, then attend.

        query: [tokens, H, D]; key, value: [tokens, H_kv, D]; returns [tokens, H, D].
        """

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put keys and values, [tokens, H_kv, D], into int64 [tokens] slots of a layer."""
        self.flat_keys[layer].index_copy_(0, slots, key)
        self.flat_values[layer].index_copy_(0, slots, value)

    def chunk_slots(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """int64 [tokens]: where the chunks' keys and values go."""
        parts = [self.slots_of(c.blocks, c.context_len, c.kv_len) for c in chunks]
        return torch.cat(parts).to(self.shape.device)

    def tree_slots(self, trees: Sequence[Tree], step: int) -> torch.Tensor:
        """int64 [tokens]: where the keys and values of one step of the trees go."""
        parts = []
        for tree in trees:
            start = tree.linear_len + step * tree.query_len
            parts.append(self.slots_of(tree.blocks, start, start + tree.query_len))
        return torch.cat(parts).to(self.shape.device)

    def slots_of(self, blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """int64 [stop - start], on the CPU: slots of a request's KV indices ``start..stop-1``."""
        index = torch.arange(start, stop)
        table = torch.tensor(list(blocks), dtype=torch.int64)
        return table[index // self.block_size] * self.block_size + index % self.block_size
