"""Examines something in a process of its own: python -m vllm_ssd.tools.check.trials < EXAMINATION

A process that has used a GPU keeps some of its memory, and Ray brings threads and changes the
environment. The process prints each finding as a line of JSON.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_ssd.lifecycle.detached import absolute_paths
from vllm_ssd.tools.check.findings import Finding

_FOUND = b"found "  # prefix of a finding's line; libraries print lines, too


class TrialFailed(Exception):
    """The process has failed; the message says why, as the end of a sentence."""


def examine_apart(
    examine: Callable[..., Iterator[Finding]],
    *arguments: Any,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[Finding]:
    """The findings of ``examine(*arguments)`` in a process that has these variables, too. Raises
    ``TrialFailed`` if it fails or takes more than ``limit_s`` seconds. folder: where it runs."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_ssd.tools.check.trials"],
            input=pickle.dumps((examine, arguments)),
            cwd=folder,
            env={**os.environ, **absolute_paths(os.environ), **(environment or {})},
            capture_output=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"not done after {limit_s:g} s") from None
    for line in done.stdout.splitlines(keepends=True):
        if line.startswith(_FOUND) and line.endswith(b"\n"):  # not the half of one
            yield msgspec.json.decode(line.removeprefix(_FOUND), type=Finding)
    if done.returncode != 0:
        raise TrialFailed(last_words(done))


def last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why a trial's process failed, as the end of a sentence. On ROCm, a kernel that uses an
    invalid address ends the process; the stack follows the line with the cause."""
    errors = done.stderr.decode(errors="replace").strip().splitlines()
    faults = [line for line in errors if line.startswith("Memory access fault by GPU")]
    return (faults or errors or [f"exit status {done.returncode}"])[-1]


def main() -> None:
    """Entry point of a trial's process."""
    examine, arguments = pickle.load(sys.stdin.buffer)
    for finding in examine(*arguments):
        print(f"{_FOUND.decode()}{msgspec.json.encode(finding).decode()}", flush=True)
    # Skip the libraries' exit handlers, which can take minutes on GPU machines.
    os._exit(0)


if __name__ == "__main__":
    main()
