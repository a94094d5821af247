"""FlashInfer's paged prefill, causal and with custom masks. CUDA and ROCm, 16-bit types.

It uses only what both vendors' builds have: the fa2 kernels and the NHD layout. A wrapper that ever
had a mask keeps using one, so every plan has a wrapper of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import torch

from vllm_ssd.draft.attention.base import AttentionShape, ChunkPlan, PagedAttention, TreePlan
from vllm_ssd.draft.attention.masks import Chunk, Tree

WORKSPACE_BYTES, WORKSPACE_BYTES_ROCM = 256 * 2**20, 512 * 2**20

_NO_SPLIT = 256  # queries: the KV of requests with as many or more is not split


class FlashInferAttention(PagedAttention):
    """Plans attention once for all steps of a tree. Every step has the KV length of the last one; a
    mask made on the device says which entries exist yet."""

    graphs = True

    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int, max_len: int):
        super().__init__(shape, num_blocks, block_size, max_len)
        size = WORKSPACE_BYTES_ROCM if torch.version.hip else WORKSPACE_BYTES
        # Shared by all wrappers: they run on one stream.
        self.workspace = torch.empty(size, dtype=torch.uint8, device=shape.device)

    def chunk_plan(self, batch: int, queries: int) -> ChunkPlan:
        return _FlashInferChunks(self, batch, queries)

    def tree_plan(self, batch: int, branches: int, steps: int) -> TreePlan:
        return _FlashInferTrees(self, batch, branches, steps)


def plan_hints(queries: int, known: Container[str]) -> dict[str, Any]:
    """Arguments of a wrapper's ``plan`` that only some builds have. known: this build's
    arguments."""
    hints: dict[str, Any] = {"uniform_q_len": queries}  # for exact tile sizes
    if not torch.version.hip:  # some of AMD's builds list it, and raise if it is True
        # If queries alone fill the GPU, splitting KV only adds parts to merge.
        hints["disable_split_kv"] = queries >= _NO_SPLIT
    return {name: value for name, value in hints.items() if name in known}


class _Wrapper:
    """One FlashInfer wrapper, for batches of one shape. masks: packed bits, uint8 [batch, bytes],
    or None for causal attention."""

    def __init__(
        self, attention: FlashInferAttention, batch: int, queries: int, masks: torch.Tensor | None
    ):
        # Not at the top, because importing FlashInfer touches the device on ROCm.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._attention = attention
        self._causal = masks is None
        self._most_pages = -(-(attention.max_len + queries) // attention.block_size)

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=attention.shape.device)

        buffers = {
            "qo_indptr_buf": buffer(batch + 1),
            "paged_kv_indptr_buf": buffer(batch + 1),
            "paged_kv_indices_buf": buffer(batch * self._most_pages),
            "paged_kv_last_page_len_buf": buffer(batch),
        }
        if masks is not None:
            starts = torch.arange(batch + 1, dtype=torch.int32) * masks.shape[1]
            buffers["custom_mask_buf"] = masks.view(-1)
            # The kernel reads these in bytes; a plan that is given a mask sets them in bits.
            buffers["mask_indptr_buf"] = starts.to(attention.shape.device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            attention.workspace, "NHD", use_cuda_graph=True, backend="fa2", **buffers
        )
        self._queries = torch.arange(batch + 1, dtype=torch.int32) * queries
        self._hints = plan_hints(queries, inspect.signature(self._wrapper.plan).parameters)
        self._planned = torch.cuda.Event()

    def plan(self, rows: Sequence[tuple[Sequence[int], int]]) -> None:
        """Plan a batch. rows: blocks and KV length of each of its requests."""
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
            self._queries,
            torch.from_numpy(ends),
            torch.from_numpy(pages).pin_memory().to(shape.device, non_blocking=True),
            torch.from_numpy(last),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            size,
            causal=self._causal,
            sm_scale=shape.scale,
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
        self._wrapper = _Wrapper(attention, batch, queries, None)

    def fill(self, chunks: Sequence[Chunk]) -> None:
        super().fill(chunks)
        # Causal attention counts from the end, so padding needs KV, although it is ignored.
        rows: list[Any] = [([], self.queries)] * self.batch
        for row, chunk in enumerate(chunks):
            rows[row] = (chunk.blocks, chunk.context_len + self.queries)
        self._wrapper.plan(rows)

    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._wrapper.run(layer, query)


class _FlashInferTrees(TreePlan):
    def __init__(self, attention: FlashInferAttention, batch: int, branches: int, steps: int):
        super().__init__(attention, batch, branches, steps)
        size = -(-branches * attention.max_len // 8)
        device = attention.shape.device
        self._masks = torch.zeros(batch, size, dtype=torch.uint8, device=device)
        self._wrapper = _Wrapper(attention, batch, branches, self._masks)

    def fill(self, trees: Sequence[Tree | None]) -> None:
        super().fill(trees)
        rows: list[Any] = [
            ([], 1) if tree is None else (tree.blocks, tree.kv_len) for tree in trees
        ]
        self._wrapper.plan(rows + [([], 1)] * (self.batch - len(rows)))

    def prepare(self, step: torch.Tensor) -> None:
        from vllm_ssd.draft.attention.kernels import pack_tree_masks

        super().prepare(step)
        inputs = self.inputs.device
        pack_tree_masks(self._masks, inputs["linear"], inputs["parents"], inputs["kv_len"], step)

    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._wrapper.run(layer, query)
