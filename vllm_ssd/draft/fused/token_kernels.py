"""The work on each token between a decoder layer's products (``kernels.py``).

A product leaves SPLITS parts of its sums, [SPLITS, rows, outputs]. The kernel after it adds them
up, always in the same order, and does the rest of the work on a token: norms, rotary embedding, the
KV write, the residual. Each kernel reads what it can before it waits for the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.draft.overlap import let_next_begin, wait_for_last


@triton.jit
def _write_normed(new, gain, stream, normed, at, real, epsilon, CHANNELS: tl.constexpr):
    """Write a token's stream, float32 [LANES], and its RMSNorm with the weights ``gain``."""
    new = new.to(stream.dtype.element_ty)
    tl.store(stream + at, new, mask=real)
    new = new.to(tl.float32)
    norm = tl.rsqrt(tl.sum(new * new) / CHANNELS + epsilon)
    tl.store(normed + at, (new * norm * gain).to(normed.dtype.element_ty), mask=real)


@triton.jit
def embed_kernel(
    tokens,  # int64 [rows]
    table,  # [embedded, CHANNELS]
    gain,  # [CHANNELS]: the first norm's weights
    stream,  # [rows, CHANNELS]
    normed,  # [rows, CHANNELS]
    embedded,  # tokens that there are embeddings for; others are read as token 0
    multiplier,  # factor on embeddings
    epsilon,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,  # the next power of two
    OVERLAP: tl.constexpr,
):
    """A program embeds and norms one token."""
    row = tl.program_id(0)
    channel = tl.arange(0, LANES)
    real = channel < CHANNELS
    weights = tl.load(gain + channel, mask=real, other=0).to(tl.float32)
    wait_for_last(OVERLAP)
    let_next_begin(OVERLAP)
    token = tl.load(tokens + row)
    token = tl.where((token >= 0) & (token < embedded), token, 0)
    new = tl.load(table + token * CHANNELS + channel, mask=real, other=0).to(tl.float32)
    at = row * CHANNELS + channel
    _write_normed(new * multiplier, weights, stream, normed, at, real, epsilon, CHANNELS)


@triton.jit
def add_and_norm_kernel(
    parts,  # [SPLITS, rows, CHANNELS]
    bias,  # [CHANNELS]
    stream,  # [rows, CHANNELS]: added to
    gain,  # [CHANNELS]: the next norm's weights
    normed,  # [rows, CHANNELS]
    rows,
    multiplier,  # factor on the product
    epsilon,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,  # the next power of two
    SPLITS: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program adds a product to one token's stream."""
    row = tl.program_id(0)
    channel = tl.arange(0, LANES)
    real = channel < CHANNELS
    at = row * CHANNELS + channel
    weights = tl.load(gain + channel, mask=real, other=0).to(tl.float32)
    before = tl.load(stream + at, mask=real, other=0).to(tl.float32)
    added = tl.zeros([LANES], tl.float32)
    if BIASED:
        added += tl.load(bias + channel, mask=real, other=0).to(tl.float32)
    wait_for_last(OVERLAP)
    let_next_begin(OVERLAP)
    for split in tl.static_range(SPLITS):
        added += tl.load(parts + split * rows * CHANNELS + at, mask=real, other=0)
    new = before + added * multiplier
    _write_normed(new, weights, stream, normed, at, real, epsilon, CHANNELS)


@triton.jit
def rotate_kernel(
    parts,  # [SPLITS, rows, HEADS + 2 KV_HEADS, D]
    bias,  # [HEADS + 2 KV_HEADS, D]
    query_gain,  # [D]: weights of a norm of each head
    key_gain,  # [D]
    positions,  # int64 [rows]
    cos_sin,  # [positions, D]: cosines of all angles, then sines
    slots,  # int64 [rows]: where keys and values go
    query,  # [rows, HEADS, D]
    keys,  # [slots, KV_HEADS, D]
    values,
    rows,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half of D: the number of angles
    GROUP: tl.constexpr,  # heads of a program
    SPLITS: tl.constexpr,
    BIASED: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program norms and rotates some heads of one token, and writes its keys and values."""
    D: tl.constexpr = 2 * HALF
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    row = tl.program_id(0)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    angle = tl.arange(0, HALF)
    is_query = head < HEADS
    is_turned = head < HEADS + KV_HEADS
    is_key = is_turned & (head >= HEADS)
    is_value = (head < ALL) & (head >= HEADS + KV_HEADS)
    real = (head < ALL)[:, None]
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    cosine = tl.load(cos_sin + position * D + angle).to(tl.float32)[None, :]
    sine = tl.load(cos_sin + position * D + HALF + angle).to(tl.float32)[None, :]
    lane = head[:, None] * D + angle[None, :]
    x = tl.zeros([GROUP, HALF], tl.float32)
    y = tl.zeros([GROUP, HALF], tl.float32)
    if BIASED:
        x += tl.load(bias + lane, mask=real, other=0).to(tl.float32)
        y += tl.load(bias + lane + HALF, mask=real, other=0).to(tl.float32)
    wait_for_last(OVERLAP)
    let_next_begin(OVERLAP)
    for split in tl.static_range(SPLITS):
        at = parts + (split * rows + row).to(tl.int64) * (ALL * D) + lane
        x += tl.load(at, mask=real, other=0)
        y += tl.load(at + HALF, mask=real, other=0)
    new_x, new_y = x, y
    if HEAD_NORM:
        gain = tl.where(is_query[:, None], query_gain, key_gain)
        mean = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / D
        norm = tl.rsqrt(mean + epsilon)[:, None]
        new_x *= norm * tl.load(gain + angle[None, :]).to(tl.float32)
        new_y *= norm * tl.load(gain + HALF + angle[None, :]).to(tl.float32)
    turned_x = new_x * cosine - new_y * sine
    turned_y = new_y * cosine + new_x * sine
    x = tl.where(is_turned[:, None], turned_x, x).to(query.dtype.element_ty)
    y = tl.where(is_turned[:, None], turned_y, y).to(query.dtype.element_ty)
    at = query + row * (HEADS * D) + lane
    tl.store(at, x, mask=is_query[:, None])
    tl.store(at + HALF, y, mask=is_query[:, None])
    at = keys + slot * (KV_HEADS * D) + lane - HEADS * D
    tl.store(at, x, mask=is_key[:, None])
    tl.store(at + HALF, y, mask=is_key[:, None])
    at = values + slot * (KV_HEADS * D) + lane - (HEADS + KV_HEADS) * D
    tl.store(at, x, mask=is_value[:, None])
    tl.store(at + HALF, y, mask=is_value[:, None])
