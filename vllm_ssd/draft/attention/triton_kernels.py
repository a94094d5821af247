"""Tree attention's kernels in Triton.

Kernels compute what a query sees and read no mask from memory. A query sees the first entries up to
a limit, and in a tree also the entries of its own branch. KV is split over programs, and a second
kernel merges their partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.draft.overlap import let_next_begin, wait_for_last

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _take_in(
    q,
    keys,
    values,
    pages,  # pages of the request
    column,  # [COLUMNS]: KV entries of the request
    there,  # [COLUMNS]: whether they are to be read
    seen,  # [ROWS, COLUMNS]: whether they are seen
    kv_head,
    scale,
    highest,
    total,
    sums,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Take some KV entries in; returns the new highest, total and sums. These are, for each row,
    the largest logit, the sum of all exponentials relative to it, and the sum of the values
    weighted by these."""
    lane = tl.arange(0, D)
    page = tl.load(pages + column // PAGE, mask=there, other=0)
    entry = (page.to(tl.int64) * PAGE + column % PAGE) * KV_HEADS + kv_head
    k = tl.load(keys + entry[None, :] * D + lane[:, None], mask=there[None, :], other=0)
    v = tl.load(values + entry[:, None] * D + lane[None, :], mask=there[:, None], other=0)
    logits = tl.dot(q, k, input_precision="ieee") * scale
    if CAP > 0:
        logits = CAP * (2 * tl.sigmoid(2 * logits / CAP) - 1)  # CAP * tanh(logits / CAP)
    logits = tl.where(seen, logits, -1e30)
    top = tl.maximum(highest, tl.max(logits, axis=1))
    shrink = tl.exp2(highest - top)
    portion = tl.where(seen, tl.exp2(logits - top[:, None]), 0.0)
    total = total * shrink + tl.sum(portion, axis=1)
    sums = tl.dot(portion.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return top, total, sums


# Only what shapes the code is a constant, so that there are few variants to compile.
@triton.jit(
    do_not_specialize=["page_stride", "queries", "tiles", "splits", "tokens"],
    do_not_specialize_on_alignment=["seen_to", "tile_at", "linear", "width", "step", "weight"],
)
def attend_kernel(
    query,  # [tokens, heads, D]
    keys,  # [blocks, PAGE, kv heads, D]
    values,
    sinks,  # [heads]: a logit that no value belongs to
    out,  # [tokens, heads, D]: without splits
    partial,  # float32 [splits, tokens * heads, D]
    weight,  # float32 [splits, tokens * heads]: log2 of each part's sum
    pages,  # int32 [requests, page_stride]
    seen_to,  # int64 [tokens]: in a tree, the number of first KV entries a query sees; in a chunk,
    # the index of its own entry, the last it sees
    tile_at,  # int64 [5, tiles]: of trees, each tile's tree, first row and branch, rows, and splits
    linear,  # int64 [trees]: where the entries of a tree begin
    width,  # int64 [trees]: its branches
    step,  # int64 [tokens]: in a tree, the row's
    scale,  # factor on the logits, times log2(e)
    query_stride,
    page_stride,
    queries,  # of each chunk
    tiles,  # of each chunk; of all trees together
    splits,  # of each chunk; of trees the most
    tokens,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,  # the last positions that are seen, 0 = all
    CAP: tl.constexpr,  # the soft cap of the logits, times log2(e); 0 = none
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TREE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    packed = tl.arange(0, ROWS)
    if TREE:
        # Known before the step, so it needs no wait. Tiles without rows come last, and end here.
        tile = tile_at + tl.program_id(2)
        rows = tl.load(tile + 3 * tiles).to(tl.int32)
        if rows == 0:
            return
        splits = tl.load(tile + 4 * tiles).to(tl.int32)
        wait_for_last(OVERLAP)
        request = tl.load(tile).to(tl.int32)
        first_row = tl.load(tile + tiles).to(tl.int32)
        branch = tl.load(tile + 2 * tiles).to(tl.int32) + packed // GROUP
        real = packed // GROUP < rows
        row = first_row + packed // GROUP
    else:
        wait_for_last(OVERLAP)
        request = tl.program_id(2) // tiles
        packed += tl.program_id(2) % tiles * ROWS
        branch = packed // GROUP
        real = branch < queries
        row = request * queries + branch
    head = kv_head * GROUP + packed % GROUP
    lane = tl.arange(0, D)
    at = split * (tokens * HEADS) + row * HEADS + head
    if TREE and SPLIT:
        if split >= splits:
            tl.store(weight + at, tl.full([ROWS], -1e30, tl.float32), mask=real)
            return
    q = tl.load(
        query + row[:, None] * query_stride + head[:, None] * D + lane[None, :],
        mask=real[:, None],
        other=0,
    )
    limit = tl.load(seen_to + row, mask=real, other=0).to(tl.int32)
    # Numbers of entries: of the text and, in a tree, of all branches behind it.
    entries = 0
    if TREE:
        queries = tl.load(width + request).to(tl.int32)
        own_step = tl.load(step + first_row).to(tl.int32)
        text = tl.load(linear + request).to(tl.int32)
        entries = (own_step + 1) * queries
    else:
        own_step = -1
        limit += 1
        text = tl.max(limit)
    position = limit + own_step
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(tl.min(tl.where(real, position, text)) - WINDOW + 1, 0) // COLUMNS
    of_text = tl.maximum((text + COLUMNS - 1) // COLUMNS, begin)
    blocks = of_text + (entries + COLUMNS - 1) // COLUMNS
    share = (blocks - begin + splits - 1) // splits
    first = begin + split * share
    pages += request * page_stride
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    last = tl.minimum(first + share, blocks)
    # Two loops: in one, each entry would pay for both ways of being seen.
    for block in range(first, tl.minimum(last, of_text)):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        seen = column[None, :] < limit[:, None]
        if WINDOW > 0:
            seen = seen & (column[None, :] > position[:, None] - WINDOW)
        highest, total, sums = _take_in(
            q, keys, values, pages, column, column < text, seen, kv_head, scale, highest, total,
            sums, KV_HEADS, D, PAGE, CAP
        )  # fmt: skip
    if TREE:
        for block in range(tl.maximum(first, of_text), last):
            offset = (block - of_text) * COLUMNS + tl.arange(0, COLUMNS)
            there = offset < entries
            seen = ((offset % queries)[None, :] == branch[:, None]) & there[None, :]
            if WINDOW > 0:
                seen = seen & (offset // queries > own_step - WINDOW)[None, :]
            highest, total, sums = _take_in(
                q, keys, values, pages, text + offset, there, seen, kv_head, scale, highest, total,
                sums, KV_HEADS, D, PAGE, CAP
            )  # fmt: skip
    let_next_begin(OVERLAP)
    if SPLIT:
        empty = total == 0
        sums = sums / tl.where(empty, 1.0, total)[:, None]
        place = partial + at[:, None].to(tl.int64) * D + lane[None, :]
        tl.store(place, sums, mask=real[:, None])
        log_total = highest + tl.log2(tl.where(empty, 1.0, total))
        tl.store(weight + at, tl.where(empty, -1e30, log_total), mask=real)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            top = tl.maximum(highest, sink)
            shrink = tl.exp2(highest - top)
            total = total * shrink + tl.exp2(sink - top)
            sums = sums * shrink[:, None]
        place = out + (row * HEADS + head)[:, None].to(tl.int64) * D + lane[None, :]
        tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["splits", "count"], do_not_specialize_on_alignment=["weight"])
def merge_kernel(
    partial,
    weight,
    sinks,
    out,
    splits,
    count,  # heads of all tokens
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,  # heads of a program
    MOST_SPLITS: tl.constexpr,  # a power of two
    HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the splits of some heads, each split weighted by its sum. All are read at once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < count
    lane = tl.arange(0, D)
    split = tl.arange(0, MOST_SPLITS)
    at = split[:, None] * count + row[None, :]
    there = (split < splits)[:, None] & real[None, :]
    wait_for_last(OVERLAP)
    let_next_begin(OVERLAP)
    log_parts = tl.load(weight + at, mask=there, other=-1e30)
    place = partial + at[:, :, None].to(tl.int64) * D + lane[None, None, :]
    parts = tl.load(place, mask=there[:, :, None], other=0)
    highest = tl.max(log_parts, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + row % HEADS, mask=real, other=0).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    share = tl.where(there, tl.exp2(log_parts - highest[None, :]), 0.0)
    total = tl.sum(share, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - highest)
    # A part without a share may be old, and not even a number.
    sums = tl.sum(tl.where(share[:, :, None] > 0, parts * share[:, :, None], 0.0), axis=0)
    place = out + row[:, None].to(tl.int64) * D + lane[None, :]
    tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
