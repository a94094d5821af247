"""The stream of a model, from its embeddings to the norm after its last layer.

The sum of a layer's inputs and outputs is the *stream*. RMSNorm divides each token's by its root
mean square and multiplies with a weight for each channel. The kernel that writes the stream also
writes it multiplied with the weights of the next norm (*scaled*), and the sums of squares of its
tile of channels; the kernel that reads it divides its products at the end. So no kernel norms.

There is room for TILES sums of squares, a power of two; those that no tile has are 0.
"""

# mypy: allow-untyped-defs
# A kernel's arguments have Triton's types, which depend on the launch.

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.draft.overlap import wait_for_last


@triton.jit
def inverse_norm(squares, token, real, epsilon, CHANNELS: tl.constexpr, TILES: tl.constexpr):
    """1 / the root mean square of each token's stream, float32 [tokens]. squares: float32 [tokens,
    TILES]."""
    parts = tl.load(
        squares + token[:, None] * TILES + tl.arange(0, TILES)[None, :], mask=real[:, None], other=0
    )
    return tl.rsqrt(tl.sum(parts, axis=1) / CHANNELS + epsilon)


@triton.jit
def write_stream(
    new, token, channel, real, stream, scaled, squares, gain, tile, CHANNELS, TILES: tl.constexpr
):
    """Write a tile of the stream, float32 [channels, tokens], and what the next norm needs."""
    at = token[None, :] * CHANNELS + channel[:, None]
    new = new.to(stream.dtype.element_ty).to(tl.float32)
    weights = tl.load(gain + channel).to(tl.float32)
    tl.store(stream + at, new.to(stream.dtype.element_ty), mask=real[None, :])
    ahead = new * weights[:, None]
    tl.store(scaled + at, ahead.to(scaled.dtype.element_ty), mask=real[None, :])
    tl.store(squares + token * TILES + tile, tl.sum(new * new, axis=0), mask=real)


@triton.jit
def embed_kernel(
    tokens,  # int64 [rows]
    table,  # [embedded, CHANNELS]
    gain,  # [CHANNELS]: the first norm's weights
    stream,  # [rows, CHANNELS]
    scaled,  # [rows, CHANNELS]
    squares,  # float32 [rows, TILES]
    embedded,  # tokens that there are embeddings for; others are read as token 0
    multiplier,  # of embeddings
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a tile
    OVERLAP: tl.constexpr,
):
    """A program embeds one token's tile of channels."""
    wait_for_last(OVERLAP)
    row = tl.program_id(0) + tl.arange(0, 1)
    tile = tl.program_id(1)
    token = tl.load(tokens + row)
    token = tl.where((token >= 0) & (token < embedded), token, 0)
    channel = tile * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(table + token[None, :] * CHANNELS + channel[:, None]).to(tl.float32)
    write_stream(
        values * multiplier,
        row,
        channel,
        row >= 0,
        stream,
        scaled,
        squares,
        gain,
        tile,
        CHANNELS,
        TILES,
    )


@triton.jit
def final_norm_kernel(
    scaled,  # [rows, CHANNELS]: the stream multiplied with the last norm's weights
    squares,  # float32 [rows, TILES]
    hidden,  # [rows, CHANNELS]
    epsilon,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a program
    OVERLAP: tl.constexpr,
):
    """A program norms some channels of one token."""
    wait_for_last(OVERLAP)
    row = tl.program_id(0) + tl.arange(0, 1)
    at = row * CHANNELS + tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    norm = inverse_norm(squares, row, row >= 0, epsilon, CHANNELS, TILES)
    tl.store(hidden + at, (tl.load(scaled + at).to(tl.float32) * norm).to(hidden.dtype.element_ty))
