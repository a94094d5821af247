"""FlashInfer's paged prefill, causal and with custom masks. CUDA and ROCm, 16-bit types.

It uses only what both vendors' builds have: the fa2 kernels and the NHD layout. A wrapper that ever
had a mask keeps using one, so every plan has a wrapper of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from vllm_ssd.draft.attention.base import AttentionShape, ChunkPlan, PagedAttention, TreePlan
from vllm_ssd.draft.attention.kernels import pack_tree_masks
from vllm_ssd.draft.attention.masks import Chunk, Tree

WORKSPACE_BYTES, WORKSPACE_BYTES_ROCM = 256 * 2**20, 512 * 2**20

_NO_SPLIT = 256  # queries: the KV of requests with as many or more is not split


def plan_hints(queries: int | None, known: Container[str]) -> dict[str, Any]:
    """Arguments of a wrapper's ``plan`` that only some builds have. queries: of each request, None
    if they differ. known: this build's arguments."""
    hints: dict[str, Any] = {}
    if queries is not None:
        hints["uniform_q_len"] = queries  # for exact tile sizes
        if not torch.version.hip:  # some of AMD's builds list it, and raise if it is True
            # If queries alone fill the GPU, splitting KV only adds parts to merge.
            hints["disable_split_kv"] = queries >= _NO_SPLIT
    return {name: value for name, value in hints.items() if name in known}


class _Wrapper:
    """One FlashInfer wrapper, for batches of up to ``batch`` requests. queries: of each request;
    None if they differ. masks: packed bits, uint8 [bytes], or None for causal attention."""

    def __init__(
        self,
        attention: FlashInferAttention,
        batch: int,
        queries: int | None,
        masks: torch.Tensor | None = None,
    ):
        # Not at the top, because importing FlashInfer touches the device on ROCm.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._attention = attention
        self._causal = masks is None
        most_pages = -(-(attention.max_len + (queries or 0)) // attention.block_size)

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=attention.shape.device)

        buffers = {
            "qo_indptr_buf": buffer(batch + 1),
            "paged_kv_indptr_buf": buffer(batch + 1),
            "paged_kv_indices_buf": buffer(batch * most_pages),
            "paged_kv_last_page_len_buf": buffer(batch),
        }
        if masks is not None:
            # mask_starts: the byte where each request's mask begins. A plan that is given a mask
            # would set it in bits.
            self.mask_starts = buffer(batch + 1)
            buffers |= {"custom_mask_buf": masks, "mask_indptr_buf": self.mask_starts}
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            attention.workspace, "NHD", use_cuda_graph=True, backend="fa2", **buffers
        )
        self._hints = plan_hints(queries, inspect.signature(self._wrapper.plan).parameters)
        self._planned = torch.cuda.Event()

    def plan(self, starts: Sequence[int], rows: Sequence[tuple[Sequence[int], int]]) -> None:
        """Plan a batch. starts: the first query of each of its requests, and their number at the
        end; rows: blocks and KV length of each request."""
        # The wrapper's one pinned buffer may still be on its way to the device from the last plan.
        self._planned.synchronize()
        attention, shape = self._attention, self._attention.shape
        size = attention.block_size
        counts = np.array([0, *(-(-length // size) for _, length in rows)], dtype=np.int32)
        ends = counts.cumsum(dtype=np.int32)
        pages = np.full(ends[-1], attention.padding_block, dtype=np.int32)
        for (blocks, _), start, count in zip(rows, ends, counts[1:]):
            owned = blocks[:count]
            pages[start : start + len(owned)] = owned
        last = np.array([(length - 1) % size + 1 for _, length in rows], dtype=np.int32)
        # All but the pages stay on the CPU: FlashInfer would copy them back from the device.
        self._wrapper.plan(
            torch.tensor(starts, dtype=torch.int32),
            torch.from_numpy(ends),
            torch.from_numpy(pages).pin_memory().to(shape.device, non_blocking=True),
            torch.from_numpy(last),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            size,
            causal=self._causal,
            sm_scale=shape.scale,
            logits_soft_cap=shape.soft_cap or None,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            **self._hints,
        )
        # One ROCm release leaves on the device what the launch reads on the host.
        if isinstance(self._wrapper._plan_info, torch.Tensor):
            self._wrapper._plan_info = self._wrapper._plan_info.cpu()
        self._planned.record()

    def run(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        kv = (self._attention.keys[layer], self._attention.values[layer])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        result: torch.Tensor = self._wrapper.run(query, kv, out=out, enable_pdl=False)
        return result


class _FlashInferChunks(ChunkPlan):
    def __init__(self, attention: FlashInferAttention, batch: int, queries: int):
        super().__init__(attention, batch, queries)
        self._wrapper = _Wrapper(attention, batch, queries)

    def fill(self, chunks: Sequence[Chunk]) -> None:
        super().fill(chunks)
        # Causal attention counts from the end, so padding needs KV, although it is ignored.
        rows: list[Any] = [([], self.queries)] * self.batch
        for row, chunk in enumerate(chunks):
            rows[row] = (chunk.blocks, chunk.context_len + self.queries)
        self._wrapper.plan(range(0, (self.batch + 1) * self.queries, self.queries), rows)

    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._wrapper.run(layer, query)


class _FlashInferTrees(TreePlan):
    """Its last request is the padding, and those between the trees and it have no query."""

    def __init__(self, attention: FlashInferAttention, rows: int, steps: int, tile: int):
        super().__init__(attention, rows, steps, tile)
        self._row_bytes = -(-attention.max_len // 8)
        device = attention.shape.device
        self._masks = torch.zeros(rows * self._row_bytes, dtype=torch.uint8, device=device)
        self._wrapper = _Wrapper(attention, self.tiles + 1, None, self._masks)

    def fill(self, trees: Sequence[Tree], steps: Sequence[int]) -> None:
        super().fill(trees, steps)
        used = [0, *accumulate(tree.branches for tree in trees)]
        starts = [*used, *[used[-1]] * (self.tiles - len(trees)), self.rows]
        rows: list[Any] = [(tree.blocks, tree.kv_len) for tree in trees]
        rows += [([], 1)] * (self.tiles + 1 - len(trees))
        self._wrapper.plan(starts, rows)
        mask_starts = torch.tensor(starts, dtype=torch.int32) * self._row_bytes
        self._wrapper.mask_starts.copy_(mask_starts.pin_memory(), non_blocking=True)

    def prepare(self) -> None:
        super().prepare()
        pack_tree_masks(self._masks, self.inputs.device, self._row_bytes)

    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._wrapper.run(layer, query)


class FlashInferAttention(PagedAttention):
    """Plans attention when trees come or go. Every step has the KV length of its tree's last one; a
    mask made on the device says which entries exist yet."""

    chunks, trees = _FlashInferChunks, _FlashInferTrees
    graphs = True

    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int, max_len: int):
        super().__init__(shape, num_blocks, block_size, max_len)
        size = WORKSPACE_BYTES_ROCM if torch.version.hip else WORKSPACE_BYTES
        # Shared by all wrappers: they run on one stream.
        self.workspace = torch.empty(size, dtype=torch.uint8, device=shape.device)
