"""Random Llamas so small that a CPU runs them in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # which token is next depends on the whole text
    "bos_token_id": None,
    "eos_token_id": None,
    "architectures": ["LlamaForCausalLM"],
}


def tiny_config(vocab_size: int, **changes: Any) -> LlamaConfig:
    """A config of this shape, with ``changes``."""
    return LlamaConfig(vocab_size=vocab_size, **{**TINY, **changes})


def tiny_llama(seed: int, vocab_size: int, **changes: Any) -> LlamaForCausalLM:
    """The random function of this seed, in float32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(vocab_size, **changes)).float().eval()


def save_tiny(folder: Path) -> Path:
    """`folder`, filled with a random function of 400 tokens, without a tokenizer."""
    tiny_llama(1, 400, tie_word_embeddings=True).save_pretrained(folder)
    return folder
