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
from vllm_ssd.draft.inputs import Inputs
from vllm_ssd.draft.overlap import launch_options

_WIDE_KV_BLOCK, _KV_BLOCK = 128, 64  # KV entries at a time, for small heads and others
_MOST_SPLITS = 16
_MERGED = 32  # parts of heads that a program merges
_FEW_SPLITS = 4  # these and fewer share a text more evenly in narrow blocks
# Programs that fill a GPU: more splits would only add parts to merge.
ENOUGH_PROGRAMS = 264
# Bytes. On AMD's GPUs, heads of this size or more do not load KV ahead: two stages of it would need
# more than the 64 KiB of local memory of a gfx942.
_LARGE_HEAD = 512
_SMALL_HEAD = 128  # bytes
# Queries times the heads that share their KV, of a program, at most. With few branches, smaller
# tiles give enough programs.
_TILE_ROWS, _FEW_ROWS = 64, 32
_NARROW_ROWS, _NARROW_HEAD = (16, 32), 256  # of tiles for many narrow trees; bytes
_TILE_BYTES = 8192  # of queries: larger tiles were not measured with narrow blocks
# Kinds of plans: programs that fill a GPU, in halves of ``ENOUGH_PROGRAMS``; the fewest splits of
# trees with many tiles; warps; stages of loads, 0 = Triton's choice. More programs fit a GPU if
# they load narrow blocks ahead, and even more with narrow tiles.
_USUAL, _CROWDED, _NARROW = (2, _MOST_SPLITS, 4, 0), (3, 2, 4, 2), (4, 1, 2, 3)


class _Paged(Plan):
    """Has page tables on the device and launches the kernels. Trees have their tiles in one line,
    and each chunk has ``_tiles``."""

    attention: TritonAttention
    _tree = False
    # For the kernel: the last entry that each token sees. Then of trees the tiles, linear lengths,
    # widths and steps, of chunks any four tensors.
    _places: tuple[torch.Tensor, ...]

    def allocate(self, requests: int, queries: int, tokens: int, longest: int) -> None:
        """Allocate what recorded graphs point to. requests: that have a page table; queries: of
        each, as far as they share tiles; tokens: of all; longest: KV entries of a request."""
        attention, shape = self.attention, self.attention.shape
        device, group = shape.device, shape.group
        most = -(-longest // attention.block_size)
        self._pages = torch.zeros(requests, most, dtype=torch.int32, device=device)
        self._host_pages = np.zeros((requests, most), dtype=np.int32)
        self._sent: list[tuple[Sequence[int], int]] = [((), 0)] * requests  # blocks, pages of these
        rows = max(triton.next_power_of_2(queries * group), 16)
        # Tiles of trees are small enough already, and only a tile holds heads that share their KV.
        sizes = (rows,) if self._tree else (min(rows, _TILE_ROWS), min(rows, _TILE_ROWS // 2))
        head_bytes = shape.head_dim * shape.dtype.itemsize
        narrow = self._tree and queries < attention.tile(tokens, tokens)
        crowded = self._tree and tokens > _FEW_ROWS <= rows <= _TILE_BYTES // head_bytes
        kind = _NARROW if narrow else _CROWDED if crowded else _USUAL
        halves, self._least, self._warps, stages = kind
        self._enough = ENOUGH_PROGRAMS * halves // 2
        for self._rows in sizes:
            self._tiles = triton.cdiv(queries * group, self._rows)
            programs = triton.cdiv(tokens, queries) * self._tiles * shape.num_kv_heads
            self._splits = max(1, min(_MOST_SPLITS, self._enough // programs))
            if self._splits < _MOST_SPLITS:
                break  # these rows give enough programs
        self._tokens, self._queries = tokens, queries
        parts = (self._splits, tokens * shape.num_heads)
        wide = head_bytes <= _SMALL_HEAD and not 1 < self._splits <= _FEW_SPLITS
        self._columns = _WIDE_KV_BLOCK if wide and kind is _USUAL else _KV_BLOCK
        stages = 1 if head_bytes >= _LARGE_HEAD and is_hip() else stages
        self._stages = {"num_stages": stages} if stages else {}
        self._overlap = launch_options(device)
        # Zeros, because nothing is written for padding.
        self._partial = torch.zeros(*parts, shape.head_dim, dtype=torch.float32, device=device)
        self._weight = torch.zeros(parts, dtype=torch.float32, device=device)

    def send_pages(self, items: Sequence[Chunk | Tree]) -> None:
        """Send the requests' new blocks to the device. A request's list of blocks only grows, and
        another text has another list. So blocks that are on the device already are not sent
        again."""
        size = self.attention.block_size
        width = 0
        for row, item in enumerate(items):
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
        # Without splits, nothing is written for a tree's padding.
        make = torch.zeros if self._tree and self._splits == 1 else torch.empty
        out = make(query.shape, dtype=query.dtype, device=query.device)
        sinks = shape.sinks[layer] if shape.sinks else self._weight
        tiles = self._tiles if self._tree else self._tiles * (self._tokens // self._queries)
        attend_kernel[(shape.num_kv_heads, self._splits, tiles)](
            query,
            attention.keys[layer],
            attention.values[layer],
            sinks,
            out,
            self._partial,
            self._weight,
            self._pages,
            *self._places,
            shape.scale * LOG2_E.value,
            query.stride(0),
            self._pages.stride(0),
            self._queries,
            self._tiles,
            self._splits,
            self._tokens,
            GROUP=shape.group,
            HEADS=shape.num_heads,
            D=shape.head_dim,
            WINDOW=shape.window(layer),
            CAP=shape.soft_cap * LOG2_E.value,
            PAGE=attention.block_size,
            ROWS=self._rows,
            COLUMNS=self._columns,
            TREE=self._tree,
            SPLIT=self._splits > 1,
            HAS_SINKS=bool(shape.sinks),
            num_warps=self._warps,
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
    def __init__(self, attention: TritonAttention, batch: int, queries: int):
        super().__init__(attention, batch, queries)
        self.allocate(batch, queries, batch * queries, attention.max_len + queries)
        self._places = (self.positions,) * 5

    def fill(self, chunks: Sequence[Chunk]) -> None:
        super().fill(chunks)
        self.send_pages(chunks)


class _TritonTrees(_Paged, TreePlan):
    _tree = True

    def __init__(self, attention: TritonAttention, rows: int, steps: int, tile: int):
        super().__init__(attention, rows, steps, tile)
        self.allocate(self.tiles, tile, rows, attention.max_len)
        self._tiles = self.tiles
        inputs = self.inputs.device
        self._tile_inputs = Inputs(attention.shape.device, {"tile_at": (5, self.tiles)})
        tiles_at = self._tile_inputs.device["tile_at"]
        self._places = inputs["parent"], tiles_at, inputs["linear"], inputs["width"], self.step

    def fill(self, trees: Sequence[Tree], steps: Sequence[int]) -> None:
        super().fill(trees, steps)
        self.send_pages(trees)
        counts = self.inputs.host["width"][: len(trees)]
        of_tree = -(-counts // self.tile)
        tree = np.repeat(np.arange(len(trees)), of_tree)
        branch = (np.arange(len(tree)) - (of_tree.cumsum() - of_tree)[tree]) * self.tile
        row = (counts.cumsum() - counts)[tree] + branch
        host = self._tile_inputs.host["tile_at"]
        host[:] = 0
        host[:4, : len(tree)] = tree, row, branch, np.minimum(counts[tree] - branch, self.tile)
        # Many narrow trees have more tiles than ``allocate`` counts on.
        programs = max(len(tree), 1) * self.attention.shape.num_kv_heads
        host[4] = min(self._splits, max(self._enough // programs, self._least))
        self._tile_inputs.send()


class TritonAttention(PagedAttention):
    """Serves heads whose size is a power of two."""

    chunks, trees = _TritonChunks, _TritonTrees
    graphs = True
    crowded = 2

    def tile(self, rows: int, widest: int) -> int:
        group = self.shape.group
        most = _TILE_ROWS // 2 if rows <= _FEW_ROWS else _TILE_ROWS
        tile = min(max(most // group, 1), _TILE_ROWS // 4)
        if rows <= _FEW_ROWS or self.shape.head_dim * self.shape.dtype.itemsize > _NARROW_HEAD:
            return tile
        narrow = (size // group for size in _NARROW_ROWS)
        return next((n for n in narrow if max(widest, self.narrowest) <= n < tile), tile)
