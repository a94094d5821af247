"""Triton's interpreter, which runs kernels on a CPU.

It is chosen for a whole process, before Triton is imported. So a file of tests that need it,
collected by any other process, runs itself again in one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = os.environ.get("TRITON_INTERPRET") == "1"
UNIT = Path(__file__).parents[1] / "unit"
FILES = [
    UNIT / "draft" / "test_fused_layers.py",
    UNIT / "table" / "test_device_publisher.py",
    UNIT / "table" / "test_pages.py",
    UNIT / "worker" / "test_lookup_kernel.py",
]


def run_again(file: str) -> None:
    """Run a file's tests in the interpreter; an ``AssertionError`` with what pytest says if one of
    them fails."""
    done = _all_done()[Path(file)]
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def _all_done() -> dict[Path, subprocess.CompletedProcess[str]]:
    """All files' runs at the same time, as the interpreter keeps one core busy."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(FILES, pool.map(_run, FILES), strict=True))


def _run(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
