"""Reference backend: gathered KV and torch's scaled dot product attention. Runs everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_ssd.draft.attention.base import ChunkPlan, PagedAttention, Plan, TreePlan
from vllm_ssd.draft.attention.masks import Chunk, Tree, causal_mask, tree_mask


class SDPAAttention(PagedAttention):
    """KV is padded to the longest of the batch; what is masked costs, but is never seen."""

    def chunk_plan(self, batch: int, queries: int) -> ChunkPlan:
        return _SDPAChunks(self, batch, queries)

    def tree_plan(self, batch: int, branches: int, steps: int) -> TreePlan:
        return _SDPATrees(self, batch, branches, steps)


class _Gathered(Plan):
    """kv_slots: int64 [batch * width], of every entry a request may see; mask: float
    [batch, 1, queries, width], since a bool mask would keep torch off its fused CPU kernel."""

    kv_slots: torch.Tensor
    mask: torch.Tensor

    def gather(self, items: Sequence[Chunk | Tree | None], width: int) -> None:
        attention = self.attention
        slots = np.zeros((self.batch, width), dtype=np.int64)
        for row, item in zip(slots, items):
            if item is not None:
                row[: item.kv_len] = attention.slots_of(item.blocks, np.arange(item.kv_len))
        self.kv_slots = torch.from_numpy(slots).view(-1).to(attention.shape.device)

    def set_mask(self, seen: torch.Tensor) -> None:
        hidden = torch.zeros(seen.shape, dtype=self.attention.shape.dtype, device=seen.device)
        self.mask = hidden.masked_fill_(~seen, float("-inf")).unsqueeze(1)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        attention, shape = self.attention, self.attention.shape
        attention.write(layer, self.slots, key, value)
        heads = (-1, shape.num_kv_heads, shape.head_dim)
        keys, values = (
            memory[layer].view(heads).index_select(0, self.kv_slots).view(self.batch, *heads)
            for memory in (attention.keys, attention.values)
        )
        out = scaled_dot_product_attention(
            query.view(self.batch, self.queries, *query.shape[1:]).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self.mask,
            scale=shape.scale,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )
        return out.transpose(1, 2).reshape(query.shape)


class _SDPAChunks(_Gathered, ChunkPlan):
    def load(self, chunks: Sequence[Chunk]) -> None:
        super().load(chunks)
        width = max((chunk.kv_len for chunk in chunks), default=1)
        self.gather(chunks, width)
        self.set_mask(causal_mask(self.inputs.device["contexts"], self.queries, width))


class _SDPATrees(_Gathered, TreePlan):
    def load(self, trees: Sequence[Tree | None]) -> None:
        super().load(trees)
        self._width = int(self.inputs.host["kv_len"].max())
        self.gather(trees, self._width)

    def prepare(self, step: torch.Tensor) -> None:
        super().prepare(step)
        inputs = self.inputs.device
        self.set_mask(tree_mask(inputs["linear"], inputs["parents"], step, self._width))
