"""Hugging Face checkpoint folders: config, tensors in shards, tokenizer files."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.standin.folders import say

WEIGHTS = "model.safetensors"
SHARD_BYTES = 10**9
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what a server needs besides config and weights; files that are not there are skipped."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write named tensors as safetensors, holding no more than one shard in memory.

    Tensors that fit one shard become model.safetensors; more become model-XXXXX-of-YYYYY with
    model.safetensors.index.json. A tensor larger than `shard_bytes` gets a shard of its own.
    """
    shards: list[list[str]] = []  # the tensor names in each shard written
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        pending_bytes = 0
        say(f"{folder.name}: shard {len(shards)} written, {total_bytes / 1e9:.1f} GB so far")

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    _name_shards(folder, shards, total_bytes)


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the shards their final names, which contain their number, and write the index."""
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / WEIGHTS)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / f"{WEIGHTS}.index.json", index)
