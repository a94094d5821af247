"""The weights of a draft whose layers ``layers.py`` can compute, as vLLM has loaded them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


class Unsuited(Exception):
    """The layers of this model cannot be fused; the message is the end of a sentence that says
    why."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer with hidden size C, H heads and H_kv KV heads of D, and inner size I.

    attention_gain, feed_gain: [C], of the norms before attention and feed-forward. qkv: [(H + 2
    H_kv) * D, C], qkv_bias: [(H + 2 H_kv) * D]. query_gain, key_gain: [D], of norms of each head.
    cos_sin: [positions, D], cosines of all angles, then sines. out: [C, H * D], out_bias: [C].
    gate_up: [2 * I, C]. down: [C, I], down_bias: [C]. None: the layer has no such weight.
    """

    attention_gain: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_gain: torch.Tensor | None
    key_gain: torch.Tensor | None
    cos_sin: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor | None
    feed_gain: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class ModelWeights:
    """Weights of a model with V tokens and hidden size C. embedding: [V, C]. output: [V, C], of the
    output layer. last_gain: [C], of the norm after all layers. epsilon: of all norms.
    embedding_multiplier: factor on embeddings; residual_multiplier: factor on what each half of a
    layer adds; logits_multiplier: factor on logits."""

    embedding: torch.Tensor
    output: torch.Tensor
    layers: tuple[LayerWeights, ...]
    last_gain: torch.Tensor
    epsilon: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_multiplier: float


def read_weights(model: Any) -> ModelWeights:
    """The weights of a causal language model of vLLM's; raises ``Unsuited``."""
    stack: Any = getattr(model, "model", None)
    _only(stack, {"embed_tokens", "layers", "norm"})
    layers = tuple(map(_layer, stack.layers))
    norms = [stack.norm, *(norm for layer in stack.layers for norm in _norms(layer))]
    epsilons = {norm.variance_epsilon for norm in norms}
    multipliers = {getattr(layer, "residual_multiplier", 1.0) for layer in stack.layers}
    if len(epsilons) > 1 or len(multipliers) > 1:
        raise Unsuited("has layers that differ")
    embedding, output = stack.embed_tokens, model.lm_head
    logits = model.logits_processor
    other = getattr(output, "bias", None) is not None or logits.soft_cap is not None
    if other or _is_quantized(output, "UnquantizedEmbeddingMethod"):
        raise Unsuited("has another output layer")
    return ModelWeights(
        embedding.weight[: embedding.org_vocab_size],  # the rest is padding
        output.weight[: output.org_vocab_size],
        layers,
        stack.norm.weight,
        epsilons.pop(),
        float(getattr(stack.config, "embedding_multiplier", 1.0)),
        float(multipliers.pop()),
        float(logits.scale),
    )


def _only(module: Any, names: set[str], others: Iterable[str] = ()) -> None:
    """Raises ``Unsuited`` unless the module has all ``names``, and otherwise only ``others``."""
    found = {name for name, _ in module.named_children()} if module is not None else set()
    if not names <= found <= names.union(others):
        raise Unsuited(f"has layers of another kind ({type(module).__name__})")


def _layer(layer: Any) -> LayerWeights:
    _only(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, feed = layer.self_attn, layer.mlp
    _only(attention, {"qkv_proj", "o_proj", "rotary_emb", "attn"}, ("q_norm", "k_norm"))
    _only(feed, {"gate_up_proj", "down_proj", "act_fn"})
    if type(feed.act_fn).__name__ != "SiluAndMul" or feed.gate_up_proj.bias is not None:
        raise Unsuited("has another feed-forward")
    for norm in _norms(layer):
        if type(norm).__name__ != "RMSNorm" or norm.variance_size_override is not None:
            raise Unsuited("has other norms")
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_gain, key_gain = (None if norm is None else norm.weight for norm in head_norms)
    rotary, head_dim = attention.rotary_emb, attention.head_dim
    angles = getattr(rotary, "cos_sin_cache", None)
    plain = getattr(rotary, "is_neox_style", False) and rotary.rotary_dim == head_dim
    if not plain or angles is None or angles.shape[-1] != head_dim:
        raise Unsuited("turns its heads otherwise")
    if any(gain is not None and gain.shape != (head_dim,) for gain in (query_gain, key_gain)):
        raise Unsuited("norms its heads otherwise")
    for linear in (attention.qkv_proj, attention.o_proj, feed.gate_up_proj, feed.down_proj):
        if _is_quantized(linear, "UnquantizedLinearMethod"):
            raise Unsuited("has quantised weights")
    return LayerWeights(
        layer.input_layernorm.weight,
        attention.qkv_proj.weight,
        attention.qkv_proj.bias,
        query_gain,
        key_gain,
        torch.as_tensor(angles),
        attention.o_proj.weight,
        attention.o_proj.bias,
        layer.post_attention_layernorm.weight,
        feed.gate_up_proj.weight,
        feed.down_proj.weight,
        feed.down_proj.bias,
    )


def _is_quantized(module: Any, plain: str) -> bool:
    """True if weights are not stored in order, or not by vLLM's method ``plain``."""
    if type(module.quant_method).__name__ != plain:
        return True
    return module.weight.dim() != 2 or not module.weight.is_contiguous()


def _norms(layer: Any) -> list[Any]:
    attention = layer.self_attn
    of_heads = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *of_heads]
    return [norm for norm in norms if norm is not None]
