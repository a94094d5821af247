"""Hugging Face checkpoint folders: config and tokenizer files."""

import json
import shutil
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json of a checkpoint folder."""
    content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(content, encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what a server needs besides config and weights; files that are not there are skipped."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
