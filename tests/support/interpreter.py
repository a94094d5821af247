"""Triton's interpreter, which runs kernels on a CPU.

It is chosen for a whole process, before Triton is imported; `make unit` chooses it. A file of tests
that need it, collected by another process, runs itself again in one of its own. So does a file of
tests that compile kernels, collected by a process with the interpreter.
"""

import os
import subprocess
import sys

HERE = os.environ.get("TRITON_INTERPRET") == "1"


def run_again(file: str) -> None:
    """Run a file's tests in the interpreter, or without it if this process has it; an
    ``AssertionError`` with what pytest says if one of them fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "0" if HERE else "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
