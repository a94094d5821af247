"""Tree attention in Triton: CUDA and ROCm, any floating type, nothing to plan on the host.

What a query sees is arithmetic, not a mask in memory: the first entries up to a limit, and in a
tree the entries of its own branch. KV is split over programs, whose partial results a second kernel
merges; the number of splits is fixed with the plan, so that a recorded graph fits every length.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.target_info import is_hip

from vllm_ssd.draft.attention.base import ChunkPlan, PagedAttention, Plan, TreePlan
from vllm_ssd.draft.attention.masks import Chunk, Tree

_LOG2_E = tl.constexpr(1.4426950408889634)
_KV_BLOCK = 64
_MOST_SPLITS = 16
# Programs that fill a GPU: more splits would only be more to merge.
ENOUGH_PROGRAMS = 264
# Bytes of a head from which KV is not loaded ahead on AMD's GPUs: two stages of it would need more
# than the 64 KiB of local memory of a gfx942.
_LARGE_HEAD = 512


# Few variants to compile: only what shapes the code is a constant.
@triton.jit(
    do_not_specialize=["page_stride", "queries", "tiles", "splits"],
    do_not_specialize_on_alignment=["seen_to", "linear", "step", "weight"],
)
def _attend(
    query,  # [batch * queries, heads, D]
    keys,  # [blocks, PAGE, kv heads, D]
    values,
    partial,  # float32 [splits, batch * queries * heads, D]
    weight,  # float32 [splits, batch * queries * heads]: log2 of each part's sum
    pages,  # int32 [batch, page_stride]
    seen_to,  # int64 [batch * queries]: in a tree, the number of first KV entries a query sees; in
    # a chunk, the index of its own entry, the last it sees
    linear,  # int64 [batch]: where the entries of a tree begin
    step,  # int64 [1]: the tree's
    scale,  # of the logits, times log2(e)
    query_stride,
    page_stride,
    queries,
    tiles,  # of a request's queries and their heads
    splits,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,  # the last positions that are seen, 0 = all
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TREE: tl.constexpr,
):
    request = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    packed = tile * ROWS + tl.arange(0, ROWS)
    branch = packed // GROUP
    real = branch < queries
    row = request * queries + branch
    head = kv_head * GROUP + packed % GROUP
    lane = tl.arange(0, D)
    q = tl.load(
        query + row[:, None] * query_stride + head[:, None] * D + lane[None, :],
        mask=real[:, None],
        other=0,
    )
    limit = tl.load(seen_to + row, mask=real, other=0).to(tl.int32)
    start_of_tree = 0
    if TREE:
        start_of_tree = tl.load(linear + request).to(tl.int32)
        own_step = tl.load(step).to(tl.int32)
        end = start_of_tree + (own_step + 1) * queries
    else:
        own_step = -1
        limit += 1
        end = tl.max(limit)
    position = limit + own_step
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(tl.min(tl.where(real, position, end)) - WINDOW + 1, 0) // COLUMNS
    blocks = (end + COLUMNS - 1) // COLUMNS
    share = (blocks - begin + splits - 1) // splits
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    first = begin + split * share
    for block in range(first, tl.minimum(first + share, blocks)):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        there = column < end
        page = tl.load(pages + request * page_stride + column // PAGE, mask=there, other=0)
        entry = (page.to(tl.int64) * PAGE + column % PAGE) * (HEADS // GROUP) + kv_head
        k = tl.load(keys + entry[None, :] * D + lane[:, None], mask=there[None, :], other=0)
        logits = tl.dot(q, k, input_precision="ieee") * scale
        seen = column[None, :] < limit[:, None]
        if WINDOW > 0:
            seen = seen & (column[None, :] > position[:, None] - WINDOW)
        if TREE:
            offset = column - start_of_tree
            of_tree = offset >= 0
            if WINDOW > 0:
                of_tree = of_tree & (offset // queries > own_step - WINDOW)
            seen = seen | (of_tree[None, :] & (offset[None, :] % queries == branch[:, None]))
        logits = tl.where(seen & there[None, :], logits, -1e30)
        top = tl.maximum(highest, tl.max(logits, axis=1))
        shrink = tl.exp2(highest - top)
        portion = tl.where(seen & there[None, :], tl.exp2(logits - top[:, None]), 0.0)
        total = total * shrink + tl.sum(portion, axis=1)
        v = tl.load(values + entry[:, None] * D + lane[None, :], mask=there[:, None], other=0)
        sums = sums * shrink[:, None]
        sums += tl.dot(portion.to(v.dtype), v, input_precision="ieee")
        highest = top
    empty = total == 0
    sums = sums / tl.where(empty, 1.0, total)[:, None]
    at = split * (tl.num_programs(0) // tiles * queries * HEADS) + row * HEADS + head
    tl.store(partial + at[:, None].to(tl.int64) * D + lane[None, :], sums, mask=real[:, None])
    tl.store(
        weight + at,
        tl.where(empty, -1e30, highest + tl.log2(tl.where(empty, 1.0, total))),
        mask=real,
    )


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["weight"])
def _merge(
    partial,
    weight,
    sinks,  # [heads]: a logit that no value belongs to
    out,
    splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the splits of one head of one token, each weighted by its sum."""
    at = tl.program_id(0)
    count = tl.num_programs(0)
    split = tl.arange(0, MOST_SPLITS)
    lane = tl.arange(0, D)
    weights = tl.load(weight + split * count + at, mask=split < splits, other=-1e30)
    highest = tl.max(weights)
    rest = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + at % HEADS).to(tl.float32) * _LOG2_E
        highest = tl.maximum(highest, sink)
        rest = tl.exp2(sink - highest)
    weights = tl.exp2(weights - highest)
    place = (split[:, None].to(tl.int64) * count + at) * D + lane[None, :]
    parts = tl.load(partial + place, mask=(split < splits)[:, None], other=0)
    merged = tl.sum(parts * weights[:, None], axis=0) / (tl.sum(weights) + rest)
    tl.store(out + at.to(tl.int64) * D + lane, merged.to(out.dtype.element_ty))


class TritonAttention(PagedAttention):
    """For heads whose size is a power of two."""

    graphs = True

    def chunk_plan(self, batch: int, queries: int) -> ChunkPlan:
        return _TritonChunks(self, batch, queries)

    def tree_plan(self, batch: int, branches: int, steps: int) -> TreePlan:
        return _TritonTrees(self, batch, branches, steps)


class _Paged(Plan):
    """Page tables on the device, and the launch of the kernels."""

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
        self._group = shape.num_heads // shape.num_kv_heads
        widest = 128 if shape.head_dim <= 64 else 64
        self._rows = min(max(triton.next_power_of_2(queries * self._group), 16), widest)
        self._tiles = triton.cdiv(queries * self._group, self._rows)
        programs = batch * self._tiles * shape.num_kv_heads
        self._splits = max(1, min(_MOST_SPLITS, ENOUGH_PROGRAMS // programs))
        parts = (self._splits, batch * queries * shape.num_heads)
        large = shape.head_dim * shape.dtype.itemsize >= _LARGE_HEAD
        self._stages = {"num_stages": 1} if large and is_hip() else {}
        self._partial = torch.empty(*parts, shape.head_dim, dtype=torch.float32, device=device)
        self._weight = torch.empty(parts, dtype=torch.float32, device=device)

    def load_pages(self, items: Sequence[Chunk | Tree | None]) -> None:
        size = self.attention.block_size
        counts = [0 if item is None else -(-item.kv_len // size) for item in items]
        width = max(counts, default=0)
        if not width:
            return
        table = np.zeros((len(items), width), dtype=np.int32)
        for row, (item, count) in enumerate(zip(items, counts)):
            if item is not None:
                table[row, :count] = item.blocks[:count]
        sent = torch.from_numpy(table)
        if self._pages.is_cuda:
            sent = sent.pin_memory()
        self._pages[: len(items), :width].copy_(sent, non_blocking=True)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        attention, shape = self.attention, self.attention.shape
        attention.write(layer, self.slots, key, value)
        _attend[(self.batch * self._tiles, shape.num_kv_heads, self._splits)](
            query,
            attention.keys[layer],
            attention.values[layer],
            self._partial,
            self._weight,
            self._pages,
            self.seen_to,
            self.linear,
            self.step,
            shape.scale * _LOG2_E.value,
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
            COLUMNS=_KV_BLOCK,
            TREE=self.tree,
            num_warps=8 if self._rows == 128 else 4,
            **self._stages,
        )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _merge[(self._weight.shape[1],)](
            self._partial,
            self._weight,
            shape.sinks[layer] if shape.sinks else self._weight,
            out,
            self._splits,
            HEADS=shape.num_heads,
            D=shape.head_dim,
            MOST_SPLITS=_MOST_SPLITS,
            HAS_SINKS=bool(shape.sinks),
            num_warps=1,
        )
        return out


class _TritonChunks(_Paged, ChunkPlan):
    def __init__(self, attention: PagedAttention, batch: int, queries: int):
        super().__init__(attention, batch, queries)
        self.allocate()
        self.seen_to = self.positions
        self.linear = self.step = self.positions  # any tensor: a chunk reads neither

    def load(self, chunks: Sequence[Chunk]) -> None:
        super().load(chunks)
        self.load_pages(chunks)


class _TritonTrees(_Paged, TreePlan):
    tree = True

    def __init__(self, attention: PagedAttention, batch: int, branches: int, steps: int):
        super().__init__(attention, batch, branches, steps)
        self.allocate()
        self.seen_to = self.inputs.device["parents"].view(-1)
        self.linear = self.inputs.device["linear"]

    def load(self, trees: Sequence[Tree | None]) -> None:
        super().load(trees)
        self.load_pages(trees)

    def prepare(self, step: torch.Tensor) -> None:
        super().prepare(step)
        self.step = step
