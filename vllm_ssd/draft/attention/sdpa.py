"""Reference backend: gathers KV and uses torch's scaled dot product attention. Runs everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_ssd.draft.attention.base import AttentionShape, ChunkPlan, PagedAttention, Plan, TreePlan
from vllm_ssd.draft.attention.masks import Chunk, Tree, causal_mask, tree_mask


class _Gathered(Plan):
    """A plan that gathers KV. kv_slots: int64 [requests, width], of every entry that a request may
    see; masks: by window, float [requests, 1, queries, width], because a bool mask would keep torch
    off its fused CPU kernel."""

    kv_slots: torch.Tensor
    masks: dict[int, torch.Tensor]

    def gather(self, items: Sequence[Chunk | Tree], requests: int) -> None:
        """Find the entries of the items' requests. The other requests are padding."""
        attention, width = self.attention, max((item.kv_len for item in items), default=1)
        slots = np.full((requests, width), attention.padding_slot)
        if items:
            last = np.array([[item.kv_len - 1] for item in items])
            index = np.minimum(np.arange(width), last)
            slots[: len(items)] = attention.slots_of([item.blocks for item in items], index)
        self.kv_slots = torch.from_numpy(slots).to(attention.shape.device)

    def set_masks(self, seen_in: Callable[[int], torch.Tensor]) -> None:
        """Make the mask of each window. seen_in: window -> bool [requests, queries, width]."""
        shape = self.attention.shape
        self.masks = {}
        for window in set(shape.windows or (0,)):
            seen = seen_in(window)
            hidden = torch.zeros(seen.shape, dtype=shape.dtype, device=seen.device)
            self.masks[window] = hidden.masked_fill_(~seen, float("-inf")).unsqueeze(1)

    def look_padded(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend with queries [requests, queries, H, D]; returns their shape."""
        attention, shape = self.attention, self.attention.shape
        heads = (-1, shape.num_kv_heads, shape.head_dim)
        requests, queries = query.shape[:2]
        keys, values = (
            memory[layer].view(heads).index_select(0, self.kv_slots.view(-1)).view(requests, *heads)
            for memory in (attention.keys, attention.values)
        )
        mask = self.masks[shape.window(layer)]
        if shape.sinks:  # one more entry, whose key and value are 0
            sink = shape.sinks[layer].to(shape.dtype).view(1, -1, 1, 1)
            column = sink.expand(requests, -1, queries, 1)
            mask = torch.cat([mask.expand(-1, shape.num_heads, -1, -1), column], dim=-1)
            keys, values = (
                torch.nn.functional.pad(kv, (0, 0, 0, 0, 0, 1)) for kv in (keys, values)
            )
        query, keys, values = (each.transpose(1, 2) for each in (query, keys, values))
        if shape.soft_cap:
            return _attend_capped(shape, query, keys, values, mask).transpose(1, 2)
        out = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=shape.scale, enable_gqa=shape.group > 1
        )
        return out.transpose(1, 2)


def _attend_capped(
    shape: AttentionShape,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Attention with a soft cap, which torch's own does not have. All tensors are [requests, heads,
    ...]."""
    keys, values = (kv.repeat_interleave(shape.group, 1) for kv in (keys, values))
    logits = (query @ keys.transpose(-1, -2)).float() * shape.scale
    logits = shape.soft_cap * torch.tanh(logits / shape.soft_cap) + mask
    return logits.softmax(-1).to(values.dtype) @ values


class _SDPAChunks(_Gathered, ChunkPlan):
    def fill(self, chunks: Sequence[Chunk]) -> None:
        super().fill(chunks)
        self.gather(chunks, self.batch)
        contexts, width = self.inputs.device["contexts"], self.kv_slots.shape[1]
        self.set_masks(lambda window: causal_mask(contexts, self.queries, width, window))

    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        padded = query.view(self.batch, self.queries, *query.shape[1:])
        return self.look_padded(layer, padded).reshape(query.shape)


class _SDPATrees(_Gathered, TreePlan):
    """row_of: int64 [requests, queries], the row of each padded query; place_of: int64 [rows], the
    padded query of each row."""

    def fill(self, trees: Sequence[Tree], steps: Sequence[int]) -> None:
        super().fill(trees, steps)
        counts = [tree.branches for tree in trees]
        if sum(counts) < self.rows:
            counts.append(self.rows - sum(counts))  # rows of padding
        queries, first = max(counts), np.array([0, *np.cumsum(counts)[:-1]])
        query, last = np.arange(queries), np.array(counts)[:, None] - 1
        # A query beyond a request's rows is the last of these once more.
        row_of = first[:, None] + np.minimum(query, last)
        place_of = np.arange(len(counts) * queries).reshape(row_of.shape)[query <= last]
        device = self.attention.shape.device
        self._row_of, self._place_of = (
            torch.from_numpy(each).to(device) for each in (row_of, place_of)
        )
        self.gather(trees, len(counts))

    def prepare(self) -> None:
        super().prepare()
        inputs, tree = self.inputs.device, self.inputs.device["tree"]
        of_trees = (inputs[name][tree] for name in ("linear", "width"))
        rows = *of_trees, inputs["parent"], inputs["branch"], self.step
        columns = self.kv_slots.shape[1]
        self.set_masks(lambda window: tree_mask(rows, columns, window)[self._row_of])

    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        out = self.look_padded(layer, query[self._row_of])
        return out.reshape(-1, *query.shape[1:])[self._place_of]


class SDPAAttention(PagedAttention):
    """Pads KV and queries to the longest of the batch. Masked entries cost time, but are never
    seen."""

    chunks, trees = _SDPAChunks, _SDPATrees

    def most_tiles(self, rows: int, tile: int) -> int:
        return rows
