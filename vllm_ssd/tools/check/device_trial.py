"""Tries a GPU in a process of its own: python -m vllm_ssd.tools.check.device_trial < TRIAL

Like the draft's process it sees one GPU only, and a process that has used a GPU keeps some of its
memory. It prints each finding as a line of JSON.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping

import msgspec
import torch

from vllm_ssd.lifecycle.detached import absolute_paths
from vllm_ssd.tools.check.devices import Trial, examine_device
from vllm_ssd.tools.check.findings import Finding

LIMIT_S = 900.0  # timeout of a trial: compiling FlashInfer's kernels takes minutes
_FOUND = "found "  # prefix of a finding's line; libraries print lines, too


def try_gpu(trial: Trial, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about the GPU that a process with this environment sees. If the process fails, the
    last one says so."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_ssd.tools.check.device_trial"],
            input=pickle.dumps(trial),
            env={**os.environ, **absolute_paths(os.environ), **environment},
            capture_output=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        yield _failure(trial, f"not done after {LIMIT_S:g} s")
        return
    for line in done.stdout.splitlines():
        if line.startswith(_FOUND.encode()):
            yield msgspec.json.decode(line.removeprefix(_FOUND.encode()), type=Finding)
    if done.returncode != 0:
        yield _failure(trial, last_words(done))


def _failure(trial: Trial, why: str) -> Finding:
    return Finding(
        "bad",
        "device",
        f"{trial.name} cannot be used ({why})",
        "end processes that use it exclusively, or install a driver that fits this torch",
    )


def last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why a trial's process failed, as the end of a sentence. On ROCm, a kernel that uses an
    invalid address ends the process; the stack follows the line with the cause."""
    errors = done.stderr.decode(errors="replace").strip().splitlines()
    faults = [line for line in errors if line.startswith("Memory access fault by GPU")]
    return (faults or errors or [f"exit status {done.returncode}"])[-1]


def main() -> None:
    """Entry point of a trial's process."""
    trial: Trial = pickle.load(sys.stdin.buffer)
    for finding in examine_device(trial, torch.device("cuda", 0)):
        print(f"{_FOUND}{msgspec.json.encode(finding).decode()}", flush=True)
    # Skip the libraries' exit handlers, which can take minutes on GPU machines.
    os._exit(0)


if __name__ == "__main__":
    main()
