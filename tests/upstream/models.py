"""Local models under the names that vLLM's tests have for theirs."""

from functools import partial
from pathlib import Path

import torch
from PIL import Image

from benchmarks.standin import ensure_draft, ensure_smollm2
from benchmarks.standin.checkpoint import copy_tokenizer
from benchmarks.standin.folders import build_once
from benchmarks.standin.tiny import tiny_llama

from .inject import DRAFT

_REVISION = "0" * 40


def ensure_models(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Return target and draft by what a list of tests calls them; built if they are not there.

    "smollm2" writes English; "tiny" is a random function of the same tokens, and nearly free.
    """
    smollm2 = ensure_smollm2(folder), ensure_draft(folder)
    tiny = (
        build_once(folder / f"tiny-words{name}", partial(_build_tiny, smollm2[0], noise))
        for name, noise in (("", 0.0), ("-draft", 0.02))
    )
    return {"smollm2": smollm2, "tiny": tuple(tiny)}


def _build_tiny(words: Path, noise: float, folder: Path) -> None:
    """The draft is the target with some noise, so that it is often right and sometimes wrong."""
    model = tiny_llama(1, 49152, max_position_embeddings=8192, tie_word_embeddings=True)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight += noise * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    copy_tokenizer(words, folder)


def name_models(hub: Path, names: dict[str, tuple[Path, Path]]) -> None:
    """Fill the folder of a Hugging Face cache so that it has every name's target, and the target's
    draft in a folder of it."""
    for name, (target, draft) in names.items():
        cached = hub / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True, exist_ok=True)
        (cached / "refs" / "main").write_text(_REVISION)
        snapshot = cached / "snapshots" / _REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        links = {file.name: file for file in target.iterdir()} | {DRAFT: draft}
        for link, file in links.items():
            (snapshot / link).unlink(missing_ok=True)
            (snapshot / link).symlink_to(file.resolve())


def save_image(assets: Path) -> None:
    """Fill the folder of vLLM's assets with the one image that a file of tests has to have."""
    image = assets / "vllm_public_assets" / "stop_sign.jpg"
    image.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(image)
