"""A target that sees images, with a draft that reads text: placeholders stand for the images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.common.running import counters
from tests.support.features.prompts import LONG, SHORT
from tests.support.greedy_texts import image_answers
from tests.support.harness import SSD, engine, greedy, own_run_dir, texts
from tests.support.image_target import IMAGE, PIXELS, write_image_pair

# Prompts longer than a step, so that some are read in pieces, and more than run at once.
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "limit_mm_per_prompt": {"image": 2},
}


@pytest.fixture(scope="module")
def pair(target, tmp_path_factory) -> tuple[str, str]:
    return write_image_pair(tmp_path_factory.mktemp("images"), target)


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
