"""Reference backend: gathered KV and torch's scaled dot product attention. Runs everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_ssd.draft.attention.base import AttentionShape, PagedAttention
from vllm_ssd.draft.attention.masks import Chunk, Tree, causal_mask, tree_mask


class SDPAAttention(PagedAttention):
    """A ragged batch is padded to its longest query and KV; masked rows and columns cost, but
    nothing that is padding is ever seen."""

    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int):
        super().__init__(shape, num_blocks, block_size)
        self._trees: Sequence[Tree] = ()

    def plan_chunks(self, chunks: Sequence[Chunk]) -> None:
        self._plan_kv(chunks)
        self._write_slots = self.chunk_slots(chunks)
        self._set_mask([causal_mask(c, self._width, self.shape.device) for c in chunks])

    def plan_trees(self, trees: Sequence[Tree]) -> None:
        self._plan_kv(trees)
        self._trees = trees

    def tree_step(self, step: int) -> None:
        self._write_slots = self.tree_slots(self._trees, step)
        device = self.shape.device
        self._set_mask([tree_mask(t, step, self._width, device) for t in self._trees])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.write(layer, self._write_slots, key, value)
        keys, values = self.flat_keys[layer], self.flat_values[layer]
        requests, rows = self._query_index.shape
        batch = (requests, self._width, self.shape.num_kv_heads, self.shape.head_dim)
        seen_keys = keys.index_select(0, self._kv_slots).view(batch).transpose(1, 2)
        seen_values = values.index_select(0, self._kv_slots).view(batch).transpose(1, 2)
        queries = query if self._dense else query[self._query_index.view(-1)]
        queries = queries.view(requests, rows, *query.shape[1:]).transpose(1, 2)
        out = scaled_dot_product_attention(
            queries,
            seen_keys,
            seen_values,
            attn_mask=self._mask,
            scale=self.shape.scale,
            enable_gqa=self.shape.num_heads != self.shape.num_kv_heads,
        )
        out = out.transpose(1, 2).reshape(requests * rows, *query.shape[1:])
        return out if self._dense else out[self._valid]

    def _plan_kv(self, items: Sequence[Chunk | Tree]) -> None:
        """Index tensors that do not change from step to step."""
        device = self.shape.device
        self._width = max(item.kv_len for item in items)
        slots = torch.zeros(len(items), self._width, dtype=torch.int64)
        for row, item in zip(slots, items):
            row[: item.kv_len] = self.slots_of(item.blocks, 0, item.kv_len)
        self._kv_slots = slots.view(-1).to(device)
        lengths = torch.tensor([item.query_len for item in items], device=device)
        rows = int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        columns = torch.arange(rows, device=device)
        valid = columns < lengths.unsqueeze(1)
        self._query_index = torch.where(valid, starts.unsqueeze(1) + columns, 0)
        self._valid = valid.view(-1)
        self._dense = bool(valid.all())

    def _set_mask(self, masks: list[torch.Tensor]) -> None:
        """[requests, 1, rows, width]; rows that are padding see entry 0, so that none is empty."""
        requests, rows = self._query_index.shape
        mask = torch.zeros(requests, rows, self._width, dtype=torch.bool, device=masks[0].device)
        mask[:, :, 0] = True
        for row, part in zip(mask, masks):
            row[: len(part)] = part
        # A float mask keeps torch on its fused CPU kernel; a bool mask does not.
        hidden = torch.zeros(mask.shape, dtype=self.shape.dtype, device=mask.device)
        self._mask = hidden.masked_fill_(~mask, float("-inf")).unsqueeze(1)
