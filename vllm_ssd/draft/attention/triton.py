"""Tree attention in Triton: CUDA and ROCm, any floating type, nothing to plan on the host.

A plan fixes the number of parts that KV is split into, so that a recorded graph fits every length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
from triton.language.target_info import is_hip

from vllm_ssd.draft.attention.base import ChunkPlan, PagedAttention, Plan, TreePlan
from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.attention.triton_kernels import LOG2_E, attend_kernel, merge_kernel
from vllm_ssd.draft.overlap import launch_options

_WIDE_KV_BLOCK, _KV_BLOCK = 128, 64  # KV entries at a time, for small heads and others
_MOST_SPLITS = 16
_MERGED = 32  # parts of heads that a program merges
# This many splits or fewer share a text more evenly in narrow blocks.
_FEW_SPLITS = 4
# Programs that fill a GPU: more splits would only add parts to merge.
ENOUGH_PROGRAMS = 264
# Bytes. On AMD's GPUs, heads of this size or more do not load KV ahead: two stages of it would need
# more than the 64 KiB of local memory of a gfx942.
_LARGE_HEAD = 512
_SMALL_HEAD = 128  # bytes


class TritonAttention(PagedAttention):
    """Serves heads whose size is a power of two."""

    graphs = True

    def chunk_plan(self, batch: int, queries: int) -> ChunkPlan:
        return _TritonChunks(self, batch, queries)

    def tree_plan(self, batch: int, branches: int, steps: int) -> TreePlan:
        return _TritonTrees(self, batch, branches, steps)


class _Paged(Plan):
    """Has page tables on the device and launches the kernels."""

    tree = False
    linear: torch.Tensor
    seen_to: torch.Tensor
    step: torch.Tensor

    def allocate(self) -> None:
        """Allocate what recorded graphs point to; needs batch and queries."""
        attention, batch, queries = self.attention, self.batch, self.queries
        shape = attention.shape
        device = shape.device
        most = -(-(attention.max_len + queries) // attention.block_size)
        self._pages = torch.zeros(batch, most, dtype=torch.int32, device=device)
        self._host_pages = np.zeros((batch, most), dtype=np.int32)
        self._sent: list[tuple[Sequence[int], int]] = [((), 0)] * batch  # blocks, pages of these
        self._group = shape.num_heads // shape.num_kv_heads
        rows = max(triton.next_power_of_2(queries * self._group), 16)
        for self._rows in (min(rows, 64), min(rows, 32)):
            self._tiles = triton.cdiv(queries * self._group, self._rows)
            programs = batch * self._tiles * shape.num_kv_heads
            self._splits = max(1, min(_MOST_SPLITS, ENOUGH_PROGRAMS // programs))
            if self._splits < _MOST_SPLITS:
                break  # these rows give enough programs
        parts = (self._splits, batch * queries * shape.num_heads)
        head_bytes = shape.head_dim * shape.dtype.itemsize
        wide = head_bytes <= _SMALL_HEAD and not 1 < self._splits <= _FEW_SPLITS
        self._columns = _WIDE_KV_BLOCK if wide else _KV_BLOCK
        large = head_bytes >= _LARGE_HEAD
        self._stages = {"num_stages": 1} if large and is_hip() else {}
        self._overlap = launch_options(device)
        self._partial = torch.empty(*parts, shape.head_dim, dtype=torch.float32, device=device)
        self._weight = torch.empty(parts, dtype=torch.float32, device=device)

    def send_pages(self, items: Sequence[Chunk | Tree | None]) -> None:
        """Send the requests' new blocks to the device. A request's list of blocks only grows, and
        another text has another list. So blocks that are on the device already are not sent
        again."""
        size = self.attention.block_size
        width = 0
        for row, item in enumerate(items):
            if item is None:
                continue
            count = -(-item.kv_len // size)
            blocks, known = self._sent[row]
            begin = known if item.blocks is blocks else 0
            if count > begin:
                self._host_pages[row, begin:count] = item.blocks[begin:count]
                self._sent[row] = item.blocks, count
                width = max(width, count)
        if not width:
            return
        # A copy, because the host fills in the next pages while these are on their way.
        sent = torch.from_numpy(self._host_pages[: len(items), :width].copy())
        if self._pages.is_cuda:
            sent = sent.pin_memory()
        self._pages[: len(items), :width].copy_(sent, non_blocking=True)

    def look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        attention, shape = self.attention, self.attention.shape
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        sinks = shape.sinks[layer] if shape.sinks else self._weight
        attend_kernel[(self.batch * self._tiles, shape.num_kv_heads, self._splits)](
            query,
            attention.keys[layer],
            attention.values[layer],
            sinks,
            out,
            self._partial,
            self._weight,
            self._pages,
            self.seen_to,
            self.linear,
            self.step,
            shape.scale * LOG2_E.value,
            query.stride(0),
            self._pages.stride(0),
            self.queries,
            self._tiles,
            self._splits,
            GROUP=self._group,
            HEADS=shape.num_heads,
            D=shape.head_dim,
            WINDOW=shape.window(layer),
            PAGE=attention.block_size,
            ROWS=self._rows,
            COLUMNS=self._columns,
            TREE=self.tree,
            SPLIT=self._splits > 1,
            HAS_SINKS=bool(shape.sinks),
            num_warps=4,
            **self._stages,
            **self._overlap,
        )
        if self._splits > 1:
            count, most = self._weight.shape[1], triton.next_power_of_2(self._splits)
            merge_kernel[(triton.cdiv(count, _MERGED // most),)](
                self._partial,
                self._weight,
                sinks,
                out,
                self._splits,
                count,
                HEADS=shape.num_heads,
                D=shape.head_dim,
                ROWS=_MERGED // most,
                MOST_SPLITS=most,
                HAS_SINKS=bool(shape.sinks),
                num_warps=1,
                **self._overlap,
            )
        return out


class _TritonChunks(_Paged, ChunkPlan):
    def __init__(self, attention: PagedAttention, batch: int, queries: int):
        super().__init__(attention, batch, queries)
        self.allocate()
        self.seen_to = self.positions
        self.linear = self.step = self.positions  # any tensor: a chunk reads neither

    def fill(self, chunks: Sequence[Chunk]) -> None:
        super().fill(chunks)
        self.send_pages(chunks)


class _TritonTrees(_Paged, TreePlan):
    tree = True

    def __init__(self, attention: PagedAttention, batch: int, branches: int, steps: int):
        super().__init__(attention, batch, branches, steps)
        self.allocate()
        self.seen_to = self.inputs.device["parents"].view(-1)
        self.linear = self.inputs.device["linear"]

    def fill(self, trees: Sequence[Tree | None]) -> None:
        super().fill(trees)
        self.send_pages(trees)

    def prepare(self, step: torch.Tensor) -> None:
        super().prepare(step)
        self.step = step
