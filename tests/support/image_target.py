"""A multimodal model that speaks: SmolLM2's function in SmolVLM's shape."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

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


def write_image_target(folder: Path, smollm2: str) -> str:
    """Writes it to ``folder``. What it sees of an image is random, of the scale of its embeddings.
    Tokens that stand for images come after SmolLM2's vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.add_tokens(["<global-img>"], special_tokens=True)
    size = {"longest_edge": PIXELS}
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size),
        tokenizer,
        image_seq_len=4,
    )
    text = AutoModelForCausalLM.from_pretrained(smollm2)
    text.resize_token_embeddings(text.config.vocab_size + 128, mean_resizing=False)
    config = Idefics3Config(
        vision_config=_VISION,
        text_config=text.config.to_dict(),
        image_token_id=processor.image_token_id,
        pad_token_id=text.config.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    torch.nn.init.normal_(model.model.connector.modality_projection.proj.weight, std=0.1)
    model.model.text_model = text.model
    model.tie_weights()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
