"""A decoder layer in a few kernels: attention's projections with rotary embedding, and a gated
feed-forward. Norms are part of them (``stream_kernels.py``).

A program multiplies some rows of a weight with all tokens, of which there are up to ROWS. So
weights are read once, a tile of CHUNK columns at a time, the first AHEAD columns before their
inputs are there.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.draft.fused.stream_kernels import inverse_norm, write_stream
from vllm_ssd.draft.overlap import fetch, let_next_begin, wait_for_last


@triton.jit
def _product(
    inputs, weight, row, token, real, first, LENGTH: tl.constexpr, WHOLE: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Rows of a weight times tokens, float32 [weight rows, tokens], over LENGTH of the WHOLE
    columns from ``first`` on."""
    total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for start in range(0, LENGTH, CHUNK):
        column = first + start + tl.arange(0, CHUNK)
        weights = tl.load(weight + row[:, None] * WHOLE + column[None, :])
        at = inputs + token[None, :] * WHOLE + column[:, None]
        seen = tl.load(at, mask=real[None, :], other=0)
        total = tl.dot(weights, seen, total, input_precision="ieee")
    return total


@triton.jit
def _add_up(part, partial, arrived, tile, split, SPLITS: tl.constexpr):
    """The sum of the parts of a tile, and whether this program is the last to have one: only for
    that is it the sum. It is always added up in the same order."""
    last = split == SPLITS - 1
    if SPLITS > 1:
        SIZE: tl.constexpr = part.shape[0] * part.shape[1]
        own = tl.arange(0, part.shape[0])[:, None] * part.shape[1]
        parts = partial + tile * (SPLITS * SIZE) + own + tl.arange(0, part.shape[1])[None, :]
        tl.store(parts + split * SIZE, part)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if last:
            part = tl.zeros_like(part)
            for other in tl.static_range(SPLITS):
                part += tl.load(parts + other * SIZE, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    return part, last


@triton.jit
def project_qkv_kernel(
    scaled,  # [rows, CHANNELS]
    squares,  # float32 [rows, TILES]
    weight,  # [(HEADS + 2 KV_HEADS) * D, CHANNELS]
    bias,  # [(HEADS + 2 KV_HEADS) * D]
    query_gain,  # [D]: weights of a norm of each head
    key_gain,  # [D]
    positions,  # int64 [rows]
    cos_sin,  # [positions, D]: cosines of all angles, then sines
    slots,  # int64 [rows]: where keys and values go
    query,  # [rows, HEADS, D]
    keys,  # [slots, KV_HEADS, D]
    values,
    partial,  # float32 [HEADS + 2 KV_HEADS, SPLITS, D, ROWS]
    arrived,  # int32 [HEADS + 2 KV_HEADS], 0 before and after
    rows,
    epsilon,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # of D: that many angles
    SPLITS: tl.constexpr,  # programs that share a head: each takes a part of CHANNELS
    BIASED: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of query, key or value."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    lane = tl.arange(0, D)
    PART: tl.constexpr = CHANNELS // SPLITS
    fetch(weight, head * D + lane, CHANNELS, split * PART, AHEAD, OVERLAP)
    wait_for_last(OVERLAP)
    token = tl.arange(0, ROWS)
    real = token < rows
    part = _product(
        scaled, weight, head * D + lane, token, real, split * PART, PART, CHANNELS, CHUNK
    )
    let_next_begin(OVERLAP)
    new, last = _add_up(part, partial, arrived, head, split, SPLITS)
    if last:
        norm = inverse_norm(squares, token, real, epsilon, CHANNELS, TILES)
        new *= norm[None, :]
        if BIASED:
            new += tl.load(bias + head * D + lane).to(tl.float32)[:, None]
        out = query
        row = token.to(tl.int64) * HEADS + head
        if head >= HEADS:
            out = keys
            if head >= HEADS + KV_HEADS:
                out = values
            slot = tl.load(slots + token, mask=real, other=0)
            row = slot * KV_HEADS + (head - HEADS) % KV_HEADS
        angle = tl.arange(0, HALF)
        x, y = tl.split(tl.permute(tl.reshape(new, [2, HALF, ROWS]), [1, 2, 0]))
        if head < HEADS + KV_HEADS:
            if HEAD_NORM:
                gain = key_gain
                if head < HEADS:
                    gain = query_gain
                mean = (tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0)) / D
                norm = tl.rsqrt(mean + epsilon)
                x *= norm[None, :] * tl.load(gain + angle).to(tl.float32)[:, None]
                y *= norm[None, :] * tl.load(gain + HALF + angle).to(tl.float32)[:, None]
            position = tl.load(positions + token, mask=real, other=0)
            turn = cos_sin + position[None, :] * D + angle[:, None]
            cosine = tl.load(turn, mask=real[None, :], other=0).to(tl.float32)
            sine = tl.load(turn + HALF, mask=real[None, :], other=0).to(tl.float32)
            turned = x * cosine - y * sine
            y = y * cosine + x * sine
            x = turned
        at = out + row[None, :] * D + angle[:, None]
        tl.store(at, x.to(query.dtype.element_ty), mask=real[None, :])
        tl.store(at + HALF, y.to(query.dtype.element_ty), mask=real[None, :])


@triton.jit
def project_and_add_kernel(
    inputs,  # [rows, INPUTS]
    weight,  # [CHANNELS, INPUTS]
    bias,  # [CHANNELS]
    stream,  # [rows, CHANNELS]: added to
    gain,  # [CHANNELS]: the next norm's weights
    scaled,  # [rows, CHANNELS]
    squares,  # float32 [rows, TILES]
    partial,  # float32 [tiles, SPLITS, WIDTH, ROWS]
    arrived,  # int32 [tiles], 0 before and after
    rows,
    multiplier,  # of what is added
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a tile
    SPLITS: tl.constexpr,  # programs that share a tile: each takes a part of INPUTS
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The last program of a tile to arrive adds up its parts, always in the same order."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    channel = tile * WIDTH + tl.arange(0, WIDTH)
    PART: tl.constexpr = INPUTS // SPLITS
    fetch(weight, channel, INPUTS, split * PART, AHEAD, OVERLAP)
    wait_for_last(OVERLAP)
    token = tl.arange(0, ROWS)
    real = token < rows
    part = _product(inputs, weight, channel, token, real, split * PART, PART, INPUTS, CHUNK)
    let_next_begin(OVERLAP)
    new, last = _add_up(part, partial, arrived, tile, split, SPLITS)
    if last:
        if BIASED:
            new += tl.load(bias + channel).to(tl.float32)[:, None]
        at = stream + token[None, :] * CHANNELS + channel[:, None]
        new = new * multiplier + tl.load(at, mask=real[None, :], other=0).to(tl.float32)
        write_stream(
            new, token, channel, real, stream, scaled, squares, gain, tile, CHANNELS, TILES
        )


@triton.jit
def gate_kernel(
    scaled,  # [rows, CHANNELS]
    squares,  # float32 [rows, TILES]
    weight,  # [2 * INNER, CHANNELS]: of gates, then of what passes them
    out,  # [rows, INNER]
    rows,
    epsilon,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,  # outputs of a program
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first half of a feed-forward with SiLU."""
    inner = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    fetch(weight, inner, CHANNELS, 0, AHEAD, OVERLAP)
    fetch(weight, inner + INNER, CHANNELS, 0, AHEAD, OVERLAP)
    wait_for_last(OVERLAP)
    token = tl.arange(0, ROWS)
    real = token < rows
    gates = tl.zeros([WIDTH, ROWS], tl.float32)
    passing = tl.zeros([WIDTH, ROWS], tl.float32)
    for start in range(0, CHANNELS, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        of_gates = tl.load(weight + inner[:, None] * CHANNELS + channel[None, :])
        of_passing = tl.load(weight + (inner[:, None] + INNER) * CHANNELS + channel[None, :])
        at = scaled + token[None, :] * CHANNELS + channel[:, None]
        seen = tl.load(at, mask=real[None, :], other=0)
        gates = tl.dot(of_gates, seen, gates, input_precision="ieee")
        passing = tl.dot(of_passing, seen, passing, input_precision="ieee")
    let_next_begin(OVERLAP)
    norm = inverse_norm(squares, token, real, epsilon, CHANNELS, TILES)
    gates *= norm[None, :]
    passing *= norm[None, :]
    passed = gates * tl.sigmoid(gates) * passing
    at = out + token[None, :] * INNER + inner[:, None]
    tl.store(at, passed.to(out.dtype.element_ty), mask=real[None, :])
