"""A target that sees images, and its draft: random functions of SmolLM2's tokens that cost next to
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from benchmarks.standin.tiny import tiny_llama

PIXELS = 56  # width and height of an image
IMAGE = "<image>"  # where an image stands in a prompt
# 16 patches of an image, and one token for four of them.
_VISION = {
    "image_size": PIXELS,
    "patch_size": 14,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def write_image_pair(folder: Path, smollm2: str) -> tuple[str, str]:
    """Write target and draft to ``folder``; return their folders. The draft mostly agrees with the
    target's answers to texts. Tokens that stand for images come after SmolLM2's vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = tiny_llama(1, len(tokenizer))
    output = text.lm_head.weight.data
    output *= 0.15  # no token is nearly certain
    exact = output.clone()
    output += 0.06 * output.std() * torch.randn_like(output)
    text.save_pretrained(folder / "draft")
    tokenizer.save_pretrained(folder / "draft")
    output.copy_(exact)
    _save_target(text, tokenizer, folder / "target")
    return str(folder / "target"), str(folder / "draft")


def _save_target(text: Any, tokenizer: Any, folder: Path) -> None:
    """Save a text model that sees images, too. What it sees of an image is random, of the scale of
    its embeddings."""
    tokenizer.add_tokens(["<global-img>"], special_tokens=True)
    size = {"longest_edge": PIXELS}
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size),
        tokenizer,
        image_seq_len=4,
    )
    known = text.config.vocab_size
    text.resize_token_embeddings(known + 128, mean_resizing=False)
    text.lm_head.weight.data[known:] = 0  # no answer has an image
    config = Idefics3Config(
        vision_config=_VISION,
        text_config=text.config.to_dict(),
        image_token_id=processor.image_token_id,
        pad_token_id=text.config.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    torch.nn.init.normal_(model.model.connector.modality_projection.proj.weight, std=0.1)
    model.model.text_model = text.model
    model.lm_head = text.lm_head
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
