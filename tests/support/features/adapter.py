"""A LoRA adapter for a Llama model."""

import json
from pathlib import Path

import torch


def make_adapter(folder: Path, model: Path) -> None:
    """A random LoRA adapter, large enough to change the model's texts."""
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_key_value_heads"]
    outputs = {"q_proj": hidden, "v_proj": hidden // shape["num_attention_heads"] * heads}
    rank, random, tensors = 4, torch.Generator().manual_seed(1), {}
    for layer in range(shape["num_hidden_layers"]):
        for name, size in outputs.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{where}.lora_A.weight"] = 0.1 * torch.randn(rank, hidden, generator=random)
            tensors[f"{where}.lora_B.weight"] = 0.1 * torch.randn(size, rank, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*outputs]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
