"""Reference backend: gathers KV and uses torch's scaled dot product attention. Runs everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_ssd.draft.attention.base import ChunkPlan, PagedAttention, Plan, TreePlan
from vllm_ssd.draft.attention.masks import Chunk, Tree, causal_mask, tree_mask


class SDPAAttention(PagedAttention):
    """Pads KV to the longest of the batch. Masked entries cost time, but are never seen."""

    def chunk_plan(self, batch: int, queries: int) -> ChunkPlan:
        return _SDPAChunks(self, batch, queries)

    def tree_plan(self, batch: int, branches: int, steps: int) -> TreePlan:
        return _SDPATrees(self, batch, branches, steps)


class _Gathered(Plan):
    """A plan that gathers KV. kv_slots: int64 [batch * width], of every entry that a request may
    see; masks: by window, float [batch, 1, queries, width], because a bool mask would keep torch
    off its fused CPU kernel."""

    kv_slots: torch.Tensor
    masks: dict[int, torch.Tensor]

    def gather(self, items: Sequence[Chunk | Tree | None], width: int) -> None:
        attention = self.attention
        slots = np.zeros((self.batch, width), dtype=np.int64)
        real = [(row, item) for row, item in enumerate(items) if item is not None]
        if real:
            rows = [row for row, _ in real]
            last = np.array([[item.kv_len - 1] for _, item in real])
            index = np.minimum(np.arange(width), last)
            slots[rows] = attention.slots_of([item.blocks for _, item in real], index)
        self.kv_slots = torch.from_numpy(slots).view(-1).to(attention.shape.device)

    def set_masks(self, seen_in: Callable[[int], torch.Tensor]) -> None:
        """Make the mask of each window. seen_in: window -> bool [batch, queries, width]."""
        shape = self.attention.shape
        self.masks = {}
        for window in set(shape.windows or (0,)):
            seen = seen_in(window)
            hidden = torch.zeros(seen.shape, dtype=shape.dtype, device=seen.device)
            self.masks[window] = hidden.masked_fill_(~seen, float("-inf")).unsqueeze(1)

    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        attention, shape = self.attention, self.attention.shape
        heads = (-1, shape.num_kv_heads, shape.head_dim)
        keys, values = (
            memory[layer].view(heads).index_select(0, self.kv_slots).view(self.batch, *heads)
            for memory in (attention.keys, attention.values)
        )
        mask = self.masks[shape.window(layer)]
        if shape.sinks:  # one more entry, whose key and value are 0
            sink = shape.sinks[layer].to(shape.dtype).view(1, -1, 1, 1)
            column = sink.expand(self.batch, -1, self.queries, 1)
            mask = torch.cat([mask.expand(-1, shape.num_heads, -1, -1), column], dim=-1)
            keys, values = (
                torch.nn.functional.pad(kv, (0, 0, 0, 0, 0, 1)) for kv in (keys, values)
            )
        out = scaled_dot_product_attention(
            query.view(self.batch, self.queries, *query.shape[1:]).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            scale=shape.scale,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )
        return out.transpose(1, 2).reshape(query.shape)


class _SDPAChunks(_Gathered, ChunkPlan):
    def fill(self, chunks: Sequence[Chunk]) -> None:
        super().fill(chunks)
        width = max((chunk.kv_len for chunk in chunks), default=1)
        self.gather(chunks, width)
        contexts = self.inputs.device["contexts"]
        self.set_masks(lambda window: causal_mask(contexts, self.queries, width, window))


class _SDPATrees(_Gathered, TreePlan):
    def fill(self, trees: Sequence[Tree | None]) -> None:
        super().fill(trees)
        self._width = int(self.inputs.host["kv_len"].max())
        self.gather(trees, self._width)

    def prepare(self, step: torch.Tensor) -> None:
        super().prepare(step)
        linear, parents = self.inputs.device["linear"], self.inputs.device["parents"]
        self.set_masks(lambda window: tree_mask(linear, parents, step, self._width, window))
