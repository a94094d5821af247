"""A Llama in a GGUF file, turned into a Hugging Face checkpoint in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks.standin.checkpoint import write_json, write_tensors
from benchmarks.standin.folders import say
from benchmarks.standin.gguf_tokenizer import write_tokenizer

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file` to `folder`: config, weights, tokenizer, generation config.

    Raises ValueError if the architecture is not llama or a tensor has no place in one.
    """
    reader = gguf.GGUFReader(gguf_file)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"{gguf_file} is a {metadata['general.architecture']}, not a llama")
    config = _config(metadata, tied=all(t.name != "output.weight" for t in reader.tensors))
    say(f"{folder.name}: dequantising {len(reader.tensors)} tensors")
    write_tensors(folder, _tensors(reader, config))
    write_tokenizer(metadata, folder)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids)
    write_json(folder / "config.json", config)


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Return the Hugging Face config that GGUF metadata describes."""
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def _shortest(value: float) -> float:
    """Undo the float32 rounding of a GGUF number: 9.999999747378752e-06 was meant as 1e-05."""
    return float(str(np.float32(value)))


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dequantised tensors under their Hugging Face names, float32, [out, in] or [n]."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        # A copy: unquantised data is a read-only view of the file.
        data = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _NAMES:
            yield _NAMES[tensor.name], torch.from_numpy(data)
            continue
        match tensor.name.split("."):
            case ["blk", layer, kind, "weight"] if kind in _LAYER_NAMES:
                if kind in heads:
                    data = _unpermute(data, heads[kind])
                yield f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight", torch.from_numpy(data)
            case _:
                raise ValueError(f"no place for GGUF tensor {tensor.name} in a Llama")


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of a q or k projection [heads * d, in] back into Hugging Face's order.

    GGUF keeps the two dimensions of a rotary pair next to each other; Hugging Face keeps the
    first halves of all pairs, then the second halves.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
