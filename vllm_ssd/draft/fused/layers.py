"""The decoder layers of a draft, computed by few kernels.

A layer takes eight: attention, four products, and one after each product except that with SiLU. The
latter work on each token by itself (``token_kernels.py``). Attention takes two kernels if its KV is
split. For few tokens, reading the weights takes most of the time of a product; these products are
ours (``kernels.py``). Larger ones are torch's.
"""

from __future__ import annotations

import torch
import triton
from torch.nn.functional import linear

from vllm_ssd.draft.attention.base import PagedAttention
from vllm_ssd.draft.fused.kernels import gate_kernel, likeliest_kernel, project_kernel
from vllm_ssd.draft.fused.token_kernels import add_and_norm_kernel, embed_kernel, rotate_kernel
from vllm_ssd.draft.fused.weights import LayerWeights, ModelWeights, Unsuited
from vllm_ssd.draft.overlap import launch_options

MOST_ROWS = 128  # the most tokens that our products are for
_WIDTH = 64  # outputs of a program
_AHEAD = 128  # columns of a weight that a program fetches before its inputs are there
_FEW_ROWS = 32
# Programs that keep a GPU's memory busy; a product is split until there are as many.
_ENOUGH_PROGRAMS = 96
_MOST_SPLITS = 4
# The most bytes that a program loads ahead. If the next kernel begins before this one ends, there
# must be room for both.
_MOST_LOADED = 168 * 1024
_SMALL_MEMORY = 56 * 1024  # bytes that fit any GPU
_MOST_STAGES = 6
_GROUP, _WIDE_GROUP = 4, 8  # heads that a program rotates, of few and of many tokens
_TOKEN_WARPS = 8  # warps of a program that adds and norms
# Programs of the output layer for each multiprocessor, and the most bytes that each loads ahead.
_OUTPUT_PROGRAMS, _OUTPUT_LOADED = 2, 100 * 1024
_PARTS = 16  # of these programs' sums are added up at a time
_LEAST = -(2**63)  # less than any number that stands for a logit and its token


class FusedLayers:
    """Computes the model's forward. Raises ``Unsuited`` for shapes that it cannot compute."""

    def __init__(self, weights: ModelWeights, attention: PagedAttention):
        self._weights, self._attention = weights, attention
        shape, device = attention.shape, attention.shape.device
        self._channels, self._inner = weights.layers[0].down.shape
        self._heads = shape.num_heads + 2 * shape.num_kv_heads
        if self._channels % _WIDTH or self._inner % _WIDTH:
            raise Unsuited(f"has a hidden or inner size that is no multiple of {_WIDTH}")
        if shape.head_dim not in (32, 64, 128) or self._heads * shape.head_dim % _WIDTH:
            raise Unsuited(f"has {self._heads} heads of {shape.head_dim}")
        self._launch = launch_options(device)
        sizes = {"CHANNELS": self._channels, "LANES": triton.next_power_of_2(self._channels)}
        self._token_options = {**sizes, "num_warps": _TOKEN_WARPS, **self._launch}
        self._memory = _program_memory(device)
        self._best = torch.full((MOST_ROWS,), _LEAST, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        self._output_programs = _OUTPUT_PROGRAMS * (gpu.multi_processor_count if gpu else 1)
        self._parts = torch.empty(2 * self._output_programs * MOST_ROWS, device=device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], int64 [tokens] -> final hidden states [tokens, C]. Tokens attend to what
        ``attention.plan`` says. A token without an embedding is read as token 0."""
        weights, layers = self._weights, self._weights.layers
        kind = {"dtype": weights.embedding.dtype, "device": tokens.device}
        stream, normed = torch.empty(2, len(tokens), self._channels, **kind)
        embed_kernel[(len(tokens),)](
            tokens,
            weights.embedding,
            layers[0].attention_gain,
            stream,
            normed,
            len(weights.embedding),
            weights.embedding_multiplier,
            weights.epsilon,
            **self._token_options,
        )
        gains = [layer.attention_gain for layer in layers[1:]] + [weights.last_gain]
        for index, (layer, next_gain) in enumerate(zip(layers, gains)):
            query = self._project_heads(index, layer, normed, positions)
            seen = self._attention.plan.look(index, query)
            self._project_and_add(seen, layer.out, layer.out_bias, stream, layer.feed_gain, normed)
            passed = self._gate(normed, layer.gate_up)
            self._project_and_add(passed, layer.down, layer.down_bias, stream, next_gain, normed)
        return normed

    def likeliest(self, hidden: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states [tokens, C] -> int64 [tokens], the likeliest of the first
        ``vocabulary`` tokens after each, and float32 [tokens], its probability; for up to
        ``MOST_ROWS``."""
        weight, count, programs = self._weights.output, len(hidden), self._output_programs
        tokens = torch.empty(count, dtype=torch.int64, device=hidden.device)
        probs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        _, options = self._cut(count, _WIDTH, self._channels, programs, _OUTPUT_LOADED)
        likeliest_kernel[(programs,)](
            hidden,
            weight,
            self._best,
            self._parts,
            self._arrived,
            tokens,
            probs,
            count,
            min(vocabulary, len(weight)),
            programs,
            self._weights.logits_multiplier,
            CHANNELS=self._channels,
            LEAST=_LEAST,
            PARTS=_PARTS,
            **options,
        )
        return tokens, probs

    def _project_heads(
        self, index: int, layer: LayerWeights, normed: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the query, [tokens, H, D]; write keys and values to the KV memory."""
        attention, shape = self._attention, self._attention.shape
        count, head_dim = len(positions), shape.head_dim
        query = torch.empty(
            count, shape.num_heads, head_dim, dtype=shape.dtype, device=shape.device
        )
        parts = self._project(normed, layer.qkv)
        unused = layer.attention_gain
        group = _GROUP if count <= _FEW_ROWS else _WIDE_GROUP
        rotate_kernel[(count, triton.cdiv(self._heads, group))](
            parts,
            unused if layer.qkv_bias is None else layer.qkv_bias,
            unused if layer.query_gain is None else layer.query_gain,
            unused if layer.key_gain is None else layer.key_gain,
            positions,
            layer.cos_sin,
            attention.plan.slots,
            query,
            attention.keys[index],
            attention.values[index],
            count,
            self._weights.epsilon,
            HEADS=shape.num_heads,
            KV_HEADS=shape.num_kv_heads,
            HALF=head_dim // 2,
            GROUP=group,
            SPLITS=len(parts),
            BIASED=layer.qkv_bias is not None,
            HEAD_NORM=layer.query_gain is not None,
            num_warps=1,
            **self._launch,
        )
        return query

    def _project_and_add(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stream: torch.Tensor,
        gain: torch.Tensor,
        normed: torch.Tensor,
    ) -> None:
        """Add the product of inputs, [tokens, ...], to the stream, [tokens, C], and norm that."""
        parts = self._project(inputs, weight)
        add_and_norm_kernel[(len(inputs),)](
            parts,
            gain if bias is None else bias,
            stream,
            gain,
            normed,
            len(inputs),
            self._weights.residual_multiplier,
            self._weights.epsilon,
            SPLITS=len(parts),
            BIASED=bias is not None,
            **self._token_options,
        )

    def _project(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Parts of the product, [splits, tokens, outputs], which are to be added up."""
        count, outputs = len(inputs), len(weight)
        if count > MOST_ROWS:
            return linear(inputs.flatten(1), weight).unsqueeze(0)
        columns, programs = weight.shape[1], outputs // _WIDTH
        splits, options = self._cut(count, _WIDTH, columns, programs)
        parts = torch.empty(splits, count, outputs, dtype=torch.float32, device=inputs.device)
        project_kernel[(programs, splits)](
            inputs, weight, parts, count, OUTPUTS=outputs, INPUTS=columns, SPLITS=splits, **options
        )
        return parts

    def _gate(self, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The inner values of the feed-forward, [tokens, I]."""
        count = len(normed)
        passed = torch.empty(count, self._inner, dtype=normed.dtype, device=normed.device)
        if count > MOST_ROWS:
            torch.ops._C.silu_and_mul(passed, linear(normed, weight))
            return passed
        programs = self._inner // _WIDTH
        _, options = self._cut(count, 2 * _WIDTH, self._channels, programs)
        gate_kernel[(programs,)](
            normed, weight, passed, count, CHANNELS=self._channels, INNER=self._inner, **options
        )
        return passed

    def _cut(
        self, count: int, width: int, columns: int, programs: int, memory: int = _MOST_LOADED
    ) -> tuple[int, dict[str, int]]:
        """How a product of ``count`` tokens is cut: the programs that share a weight's columns, and
        the kernel's options. A program has ``width`` rows of the weight, and ``memory`` bytes."""
        rows = max(16, triton.next_power_of_2(count))  # that the kernel is compiled for
        few = rows <= _FEW_ROWS
        chunk = 128 if few and self._memory > _SMALL_MEMORY else 64  # columns at a time
        while columns % chunk:
            chunk //= 2
        splits = 1
        while (
            splits < _MOST_SPLITS
            and programs * splits < _ENOUGH_PROGRAMS
            and columns % (2 * splits * chunk) == 0
        ):
            splits *= 2
        loaded = (width + rows) * chunk * self._weights.embedding.itemsize
        stages = min(self._memory, memory) // loaded  # chunks on their way to a program
        return splits, {
            "WIDTH": _WIDTH,
            "ROWS": rows,
            "CHUNK": chunk,
            "AHEAD": _AHEAD,
            "num_warps": 4 if few else 8,
            "num_stages": max(1, min(stages, _MOST_STAGES)),
            **self._launch,
        }


def _program_memory(device: torch.device) -> int:
    """Bytes of a GPU's fast memory that a program may fill."""
    if device.type != "cuda" or torch.version.hip is not None:
        return _SMALL_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return min(properties.shared_memory_per_block_optin - 8 * 1024, _MOST_LOADED)
