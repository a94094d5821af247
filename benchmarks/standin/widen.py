"""Stand-ins: the function of a small Llama at the cost of a large one.

The small model sits in a corner of larger matrices. The residual stream is the small model's in
its first h of H places and zero in the others, from the embedding to the last layer, because
`o_proj` and `down_proj` have rows of zeros outside the corner. Everything else follows:

* RMSNorm averages over H places instead of h. Weights times sqrt(h/H) and an epsilon times h/H
  give the small model's result.
* Attention divides by the square root of a larger head_dim: q is scaled back. A small head's
  rotary pairs go to the places with their frequencies; q is zero in the places between.
* Query heads stay with their key/value head. `o_proj` ignores the heads that are new, and
  `down_proj` the neurons that are.
* Layers that are new add zero to the residual stream. They are spread between the small model's.

What cannot reach the residual stream is random filler, not zeros, which some hardware multiplies
at less power and so faster. `o_proj`, `down_proj` and the embedding remain mostly zeros.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.standin.checkpoint import WEIGHTS, read_config
from benchmarks.standin.corner import Axis, Corner
from benchmarks.standin.shapes import Shape

NamedTensors = Iterator[tuple[str, torch.Tensor]]
# Makes a large tensor from the small model's, or from None in a layer that is new.
Widen = Callable[[torch.Tensor | None], torch.Tensor]


def standin_config(
    small_config: dict[str, Any], shape: Shape, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the Hugging Face config of the stand-in for the model of `small_config`."""
    config = {key: value for key, value in small_config.items() if key != "dtype"}
    config.update(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        rms_norm_eps=small_config["rms_norm_eps"] * small_config["hidden_size"] / shape.hidden,
        torch_dtype=str(dtype).removeprefix("torch."),
    )
    return config


def kept_layers(layers: int, drop: Sequence[int]) -> list[int]:
    """Return the indices below `layers` that are not in `drop`.

    Raises ValueError if `drop` names a layer that does not exist.
    """
    unknown = [layer for layer in drop if not 0 <= layer < layers]
    if unknown:
        raise ValueError(f"cannot leave out layers {unknown} of a model with {layers} layers")
    return [layer for layer in range(layers) if layer not in drop]


def standin_tensors(
    small_checkpoint: Path,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    drop_layers: Sequence[int] = (),
) -> NamedTensors:
    """Return an iterator over the stand-in's tensors under their Hugging Face names.

    Each is made on `device` when its turn comes, so there is no need to hold them all. The small
    model is a folder with config.json and model.safetensors; its layers `drop_layers` are left
    out. If its embeddings are tied the stand-in's are too, and there is no lm_head.weight.

    Raises ValueError if the small model, less those layers, does not fit into `shape`.
    """
    config = read_config(small_checkpoint)
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("a Llama with biases has no stand-in")
    small = Shape.from_config(config)
    kept = kept_layers(small.layers, drop_layers)
    _check_fit(small, len(kept), shape)
    corner = Corner(small, shape, dtype, device)
    return _tensors(small_checkpoint / WEIGHTS, kept, shape.layers, corner)


def _check_fit(small: Shape, layers: int, large: Shape) -> None:
    """Raise ValueError unless `layers` layers of the small shape fit into the large one."""
    needed = {**asdict(small), "layers": layers, "queries per kv head": small.queries_per_kv}
    present = {**asdict(large), "queries per kv head": large.queries_per_kv}
    for size, least in needed.items():
        if present[size] < least:
            raise ValueError(f"a stand-in needs {size} of {least} or more, not {present[size]}")
    if large.head_dim % small.head_dim:
        raise ValueError(f"head_dim must be a multiple of {small.head_dim}, not {large.head_dim}")


def _tensors(weights_file: Path, kept: list[int], layers: int, corner: Corner) -> NamedTensors:
    """Yield the stand-in's tensors; `layers` is its number of layers, `kept` are the small ones."""
    small_layer = {i * layers // len(kept): number for i, number in enumerate(kept)}
    device = corner.hidden.places.device
    with safe_open(weights_file, framework="pt") as weights:

        def read(name: str) -> torch.Tensor:
            tensor: torch.Tensor = weights.get_tensor(name)
            return tensor.to(device, torch.float32)

        embedding = read("model.embed_tokens.weight")
        vocabulary = Axis(len(embedding), torch.arange(len(embedding), device=device))
        wide_embedding = corner.writing(vocabulary, corner.hidden, embedding)
        yield "model.embed_tokens.weight", wide_embedding
        del embedding, wide_embedding
        for layer in range(layers):
            number = small_layer.get(layer)
            for name, make in _layer_tensors(corner).items():
                weight = None if number is None else read(f"model.layers.{number}.{name}.weight")
                yield f"model.layers.{layer}.{name}.weight", make(weight)
        yield "model.norm.weight", corner.norm(read("model.norm.weight"))
        names: list[str] = weights.keys()
        if "lm_head.weight" in names:
            head = read("lm_head.weight")
            yield "lm_head.weight", corner.reading(vocabulary, corner.hidden, head)


def _layer_tensors(corner: Corner) -> dict[str, Widen]:
    """Return how each tensor of a layer is made, by name."""
    hidden, neurons, queries, keys = corner.hidden, corner.neurons, corner.queries, corner.keys
    return {
        "input_layernorm": corner.norm,
        "self_attn.q_proj": corner.query,
        "self_attn.k_proj": partial(corner.reading, keys, hidden),
        "self_attn.v_proj": partial(corner.reading, keys, hidden),
        "self_attn.o_proj": partial(corner.writing, hidden, queries),
        "post_attention_layernorm": corner.norm,
        "mlp.gate_proj": partial(corner.reading, neurons, hidden),
        "mlp.up_proj": partial(corner.reading, neurons, hidden),
        "mlp.down_proj": partial(corner.writing, hidden, neurons),
    }
