"""A target that sees images, with a draft that reads text: placeholders stand for the images. Both
are random functions of SmolLM2's tokens that cost next to nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from benchmarks.common.running import counters
from benchmarks.standin.tiny import tiny_llama
from tests.support.features.prompts import LONG, SHORT
from tests.support.greedy_texts import image_answers
from tests.support.harness import SSD, engine, greedy, own_run_dir, texts

PIXELS = 56  # width and height of an image
IMAGE = "<image>"  # where an image stands in a prompt
# 16 patches of an image, and one token for four of them.
VISION = {
    "image_size": PIXELS,
    "patch_size": 14,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
# Prompts longer than a step, so that some are read in pieces, and more than run at once.
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "limit_mm_per_prompt": {"image": 2},
}


@pytest.fixture(scope="module")
def pair(target, tmp_path_factory) -> tuple[str, str]:
    """(target, draft). The draft mostly agrees with the target's answers to texts. Tokens of images
    come after SmolLM2's vocabulary."""
    folder = tmp_path_factory.mktemp("images")
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = tiny_llama(1, len(tokenizer))
    output = text.lm_head.weight.data
    output *= 0.15  # no token is nearly certain
    exact = output.clone()
    output += 0.06 * output.std() * torch.randn_like(output)
    text.save_pretrained(folder / "draft")
    tokenizer.save_pretrained(folder / "draft")
    output.copy_(exact)
    save_target(text, tokenizer, folder / "target")
    return str(folder / "target"), str(folder / "draft")


def save_target(text: Any, tokenizer: Any, folder: Path) -> None:
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
        vision_config=VISION,
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


def prompts() -> list[Any]:
    """The first three differ in their image alone, and the next one has none."""
    noise = np.random.default_rng(0).integers(0, 256, (PIXELS, PIXELS, 3), np.uint8)
    images = [Image.fromarray(noise), *(Image.new("RGB", (PIXELS,) * 2, c) for c in ("red", "tan"))]

    def with_images(text: str, *used: Image.Image) -> dict[str, Any]:
        return {"prompt": text, "multi_modal_data": {"image": list(used)}}

    return [
        *(with_images(f"{IMAGE}\n{SHORT}", image) for image in images),
        SHORT,
        with_images(f"{LONG}{IMAGE} In short:", images[0]),
        with_images(f"A map, {IMAGE}, and another one, {IMAGE}, show", *images[:2]),
        with_images(f"{IMAGE}\n{SHORT}", images[0]),  # known to the caches
    ]


def test_same_texts_and_drafts_after_images(pair):
    image_target, draft = pair
    plain = image_answers(image_target, prompts(), 32)
    assert len({tuple(tokens) for tokens, _ in plain[:4]}) == 4, "images have no effect"
    speculation = {**SSD, "k": 3, "f": 1, "model": draft}
    with engine(image_target, speculative_config=speculation, **OPTIONS) as llm:
        for prompt, expected in zip(prompts(), plain, strict=True):
            before = counters(own_run_dir())["accepted"]
            found = texts(llm.generate([prompt], greedy(32), use_tqdm=False))
            after = counters(own_run_dir())["accepted"]
            assert found == [expected]
            assert sum(after[1:]) > sum(before[1:]), "no draft was accepted"
        together = texts(llm.generate(prompts(), greedy(32), use_tqdm=False))
        assert together == plain
