"""The decoder layers of a draft, computed by few kernels (``kernels.py``).

For batches so small that reading the weights takes most of a forward. Per layer these are five, of
which attention is two where its KV is split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from vllm_ssd.draft.attention.base import PagedAttention
from vllm_ssd.draft.fused.kernels import (
    gate_kernel,
    project_and_add_kernel,
    project_qkv_kernel,
)
from vllm_ssd.draft.fused.stream_kernels import embed_kernel, final_norm_kernel
from vllm_ssd.draft.fused.weights import LayerWeights, ModelWeights, Unsuited
from vllm_ssd.draft.overlap import launch_options

MOST_ROWS = 128  # tokens of a forward
_WIDTH = 64  # channels of a tile
_AHEAD = 256  # columns of a weight that are fetched before its inputs are there
_FEW_ROWS = 32
# Programs that keep a GPU's memory busy; a tile is split until there are as many.
_ENOUGH_PROGRAMS = 96
_MOST_SPLITS = 4
# Bytes that a program loads ahead, at most: where the next kernel is to begin before this one ends,
# there must be room for both.
_MOST_LOADED = 168 * 1024
_SMALL_MEMORY = 56 * 1024  # that much fits any GPU
_MOST_STAGES = 5


class _Tiling(NamedTuple):
    """How a product is cut. chunk: columns of the weight at a time; splits: programs that share a
    tile; stages: chunks on their way to a program."""

    chunk: int
    splits: int
    stages: int


class FusedLayers:
    """Computes what the model's forward does, for up to ``MOST_ROWS`` tokens. Raises ``Unsuited``
    for shapes that it cannot."""

    def __init__(self, weights: ModelWeights, attention: PagedAttention):
        self._weights, self._attention = weights, attention
        shape, device = attention.shape, attention.shape.device
        self._channels, self._inner = weights.layers[0].down.shape
        self._heads = shape.num_heads + 2 * shape.num_kv_heads
        if self._channels % _WIDTH or self._inner % _WIDTH:
            raise Unsuited(f"has a hidden or inner size that is no multiple of {_WIDTH}")
        if shape.head_dim not in (32, 64, 128):
            raise Unsuited(f"has heads of {shape.head_dim}")
        self._launch = launch_options(device)
        self._memory = _program_memory(device)
        tiles = self._channels // _WIDTH
        self._tiles = triton.next_power_of_2(tiles)
        size = (MOST_ROWS, self._channels)
        self._stream = torch.empty(size, dtype=shape.dtype, device=device)
        self._scaled = torch.empty(size, dtype=shape.dtype, device=device)
        # Those of tiles that there are not stay 0.
        self._squares = torch.zeros(MOST_ROWS, self._tiles, device=device)
        self._arrived = torch.zeros(max(tiles, self._heads), dtype=torch.int32, device=device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], int64 [tokens] -> final hidden states [tokens, C]. Attention is that of
        ``attention.plan``. A token without an embedding is read as token 0."""
        weights, count = self._weights, len(tokens)
        layers = weights.layers
        gains = [layer.attention_gain for layer in layers[1:]] + [weights.last_gain]
        each_channel = (count, self._channels // _WIDTH)
        common = {"CHANNELS": self._channels, "TILES": self._tiles, "num_warps": 1}
        embed_kernel[each_channel](
            tokens,
            weights.embedding,
            layers[0].attention_gain,
            self._stream,
            self._scaled,
            self._squares,
            len(weights.embedding),
            weights.embedding_multiplier,
            WIDTH=_WIDTH,
            **common,
            **self._launch,
        )
        for index, (layer, next_gain) in enumerate(zip(layers, gains)):
            query = self._project_qkv(index, layer, positions)
            seen = self._attention.plan.look(index, query)
            self._project_and_add(seen, layer.out, layer.out_bias, layer.feed_gain)
            passed = self._gate(layer.gate_up, count)
            self._project_and_add(passed, layer.down, layer.down_bias, next_gain)
        hidden = torch.empty_like(self._stream[:count])
        final_norm_kernel[each_channel](
            self._scaled,
            self._squares,
            hidden,
            weights.epsilon,
            WIDTH=_WIDTH,
            **common,
            **self._launch,
        )
        return hidden

    def _project_qkv(
        self, index: int, layer: LayerWeights, positions: torch.Tensor
    ) -> torch.Tensor:
        """The query, [tokens, H, D]; keys and values go to the KV memory."""
        attention, shape = self._attention, self._attention.shape
        count, head_dim = len(positions), shape.head_dim
        query = torch.empty(
            count, shape.num_heads, head_dim, dtype=shape.dtype, device=shape.device
        )
        rows = _rows(count)
        tiling = self._tiling(head_dim, self._channels, self._heads, rows)
        unused = layer.attention_gain
        project_qkv_kernel[(self._heads, tiling.splits)](
            self._scaled,
            self._squares,
            layer.qkv,
            unused if layer.qkv_bias is None else layer.qkv_bias,
            unused if layer.query_gain is None else layer.query_gain,
            unused if layer.key_gain is None else layer.key_gain,
            positions,
            layer.cos_sin,
            attention.plan.slots,
            query,
            attention.keys[index],
            attention.values[index],
            self._partial(self._heads, tiling, head_dim, rows),
            self._arrived,
            count,
            self._weights.epsilon,
            CHANNELS=self._channels,
            TILES=self._tiles,
            HEADS=shape.num_heads,
            KV_HEADS=shape.num_kv_heads,
            D=head_dim,
            HALF=head_dim // 2,
            BIASED=layer.qkv_bias is not None,
            HEAD_NORM=layer.query_gain is not None,
            SPLITS=tiling.splits,
            **self._product_options(rows, tiling),
        )
        return query

    def _project_and_add(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gain: torch.Tensor,
    ) -> None:
        """Add the product of inputs, [tokens, ...], to the stream."""
        rows, tiles = _rows(len(inputs)), self._channels // _WIDTH
        tiling = self._tiling(_WIDTH, weight.shape[1], tiles, rows)
        project_and_add_kernel[(tiles, tiling.splits)](
            inputs,
            weight,
            gain if bias is None else bias,
            self._stream,
            gain,
            self._scaled,
            self._squares,
            self._partial(tiles, tiling, _WIDTH, rows),
            self._arrived,
            len(inputs),
            self._weights.residual_multiplier,
            CHANNELS=self._channels,
            INPUTS=weight.shape[1],
            TILES=self._tiles,
            WIDTH=_WIDTH,
            BIASED=bias is not None,
            SPLITS=tiling.splits,
            **self._product_options(rows, tiling),
        )

    def _gate(self, weight: torch.Tensor, count: int) -> torch.Tensor:
        """[tokens, I]."""
        passed = torch.empty(
            count, self._inner, dtype=self._stream.dtype, device=self._stream.device
        )
        rows, programs = _rows(count), self._inner // _WIDTH
        tiling = self._tiling(2 * _WIDTH, self._channels, programs, rows)
        gate_kernel[(programs,)](
            self._scaled,
            self._squares,
            weight,
            passed,
            count,
            self._weights.epsilon,
            CHANNELS=self._channels,
            TILES=self._tiles,
            INNER=self._inner,
            WIDTH=_WIDTH,
            **self._product_options(rows, tiling),
        )
        return passed

    def _tiling(self, width: int, columns: int, tiles: int, rows: int) -> _Tiling:
        """Of a product of ``rows`` tokens and tiles of ``width`` rows of a weight."""
        roomy = self._memory > _SMALL_MEMORY
        chunk = 128 if roomy and rows <= _FEW_ROWS else 64
        while columns % chunk:
            chunk //= 2
        splits = 1
        while (
            splits < _MOST_SPLITS
            and tiles * splits < _ENOUGH_PROGRAMS
            and columns % (2 * splits * chunk) == 0
        ):
            splits *= 2
        loaded = (width + rows) * chunk * self._stream.itemsize
        return _Tiling(chunk, splits, max(1, min(self._memory // loaded, _MOST_STAGES)))

    def _product_options(self, rows: int, tiling: _Tiling) -> dict[str, int]:
        return {
            "ROWS": rows,
            "CHUNK": tiling.chunk,
            "AHEAD": _AHEAD,
            "num_warps": 4 if rows <= _FEW_ROWS else 8,
            "num_stages": tiling.stages,
            **self._launch,
        }

    def _partial(self, tiles: int, tiling: _Tiling, width: int, rows: int) -> torch.Tensor:
        """Memory for the parts of tiles that are split."""
        size = tiles * tiling.splits * width * rows if tiling.splits > 1 else 1
        return torch.empty(size, dtype=torch.float32, device=self._stream.device)


def _rows(count: int) -> int:
    """The rows that a kernel is compiled for."""
    return max(16, triton.next_power_of_2(count))


def _program_memory(device: torch.device) -> int:
    """Bytes of a GPU's fast memory that a program may fill."""
    if device.type != "cuda" or torch.version.hip is not None:
        return _SMALL_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return min(properties.shared_memory_per_block_optin - 8 * 1024, _MOST_LOADED)
