"""Llamas with quantised linear layers, in the formats that checkpoints on the Hub have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

_GROUP = 64  # weights of one output that share a scale, in 4 bits
_ZERO = 8  # what stands for 0 in 4 bits
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of 8 outputs each 4 bits of a word belong to
Tensors = dict[str, torch.Tensor]


def _by_channel(weight: torch.Tensor, dtype: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    """One scale for each output."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = weight.abs().amax(1, keepdim=True) / most
    levels = weight / scale
    levels = (levels.round() if dtype == torch.int8 else levels).to(dtype)
    return {"weight": levels, "weight_scale": scale}, levels.float() * scale


def _in_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels from 0 to 15, [inputs, outputs]; scales, [groups, outputs]; and their product."""
    groups = weight.t().reshape(-1, _GROUP, weight.shape[0])
    scales = (groups.abs().amax(1) / 7).half()
    levels = ((groups / scales[:, None]).round() + _ZERO).clamp(0, 15)
    meant = ((levels - _ZERO) * scales[:, None]).reshape(weight.t().shape).t()
    return levels.reshape(weight.t().shape).long(), scales, meant.float()


def _words(levels: torch.Tensor) -> torch.Tensor:
    """[rows, 8 * n] -> int32 [rows, n], the first of 8 in the lowest bits."""
    words = (levels.reshape(len(levels), -1, 8) << (4 * torch.arange(8))).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    levels, scales, meant = _in_4_bits(weight)
    zeros = torch.full(scales.shape, _ZERO - 1)  # the format's own offset
    group = torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP
    words = _words(levels.t()).t()
    return {"qweight": words, "qzeros": _words(zeros), "scales": scales, "g_idx": group}, meant


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    levels, scales, meant = _in_4_bits(weight)
    ordered = levels.reshape(len(levels), -1, 8)[..., _AWQ_ORDER].reshape(levels.shape)
    zeros = torch.full(scales.shape, _ZERO)
    return {"qweight": _words(ordered), "qzeros": _words(zeros), "scales": scales}, meant


def _compressed(kind: str) -> dict[str, Any]:
    bits = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = {**bits, "strategy": "channel", "dynamic": False}
    inputs = {**bits, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
# Name -> how a layer is quantised, what the config says, and the data type of all else.
SCHEMES: dict[str, tuple[Quantise, dict[str, Any], torch.dtype]] = {
    "int8": (lambda w: _by_channel(w, torch.int8), _compressed("int"), torch.bfloat16),
    "fp8": (lambda w: _by_channel(w, torch.float8_e4m3fn), _compressed("float"), torch.bfloat16),
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True},
        torch.float16,
    ),
    "awq": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        torch.float16,
    ),
}


_IN_4_BITS = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's products of 4 bits need AVX-512"
)
# The schemes whose products vLLM has on this CPU; the others are skipped.
COMPUTED = [
    pytest.param(name, marks=_IN_4_BITS if name in ("gptq", "awq") else ()) for name in SCHEMES
]


def write_quantised(model: LlamaForCausalLM, scheme: str, folder: Path) -> None:
    """Write the model with its layers quantised, and give it the weights that these stand for.
    Numbers of inputs and outputs must be multiples of 64."""
    quantise, said, dtype = SCHEMES[scheme]
    tensors: Tensors = {}
    for name, weight in model.state_dict().items():
        if ".layers." in name and weight.dim() == 2:
            stored, meant = quantise(weight)
            tensors |= {name.removesuffix("weight") + part: each for part, each in stored.items()}
        else:
            tensors[name] = weight.to(dtype)
            meant = tensors[name].float()
        weight.copy_(meant)
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": said, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: each.contiguous() for name, each in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
