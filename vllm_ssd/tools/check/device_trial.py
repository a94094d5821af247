"""Tries what a device can do for ssd: python -m vllm_ssd.tools.check.device_trial < trial.json

A separate process tries a GPU: like the draft's process it sees one GPU only, and a process that
has used a GPU keeps some of its memory. ``try_cpu`` works in the caller's process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import torch

from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.registry import Backend, load_backend
from vllm_ssd.draft.attention.self_test import find_fault
from vllm_ssd.draft.model import BLOCK_SIZE
from vllm_ssd.lifecycle.launch import absolute_paths
from vllm_ssd.protocol import SpeculationTable

LIMIT_S = 900.0  # timeout of a trial: compiling FlashInfer's kernels takes minutes
_TRIES = "trying "  # prefix of the line that the process prints before each part of the trial


@dataclass(frozen=True)
class Heads:
    """Sizes of a draft's attention. dtype: torch's name for it, such as "bfloat16"."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    def shape(self, device: torch.device) -> AttentionShape:
        """These sizes as an ``AttentionShape`` with the usual scale, head_dim**-0.5."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        sizes = (self.layers, self.heads, self.kv_heads, self.head_dim)
        return AttentionShape(*sizes, self.head_dim**-0.5, dtype, device)


@dataclass(frozen=True)
class Trial:
    """What to try on a device. backends: the draft's attention backends, the preferred one first.
    all_backends: whether to try those after the first sound one, too. table: path of the table that
    the device must reach, None = no table."""

    heads: Heads
    backends: tuple[Backend, ...] = ()
    all_backends: bool = False
    table: str | None = None


@dataclass(frozen=True)
class TriedBackend:
    """Result of one backend. fault: its fault as the end of a sentence, None if it is sound.
    first_s: seconds of the first test, in which kernels are compiled. again_s: seconds of the
    second test. graphs: the draft publishes from the GPU, which must then reach the table."""

    backend: Backend
    fault: str | None
    first_s: float
    again_s: float
    graphs: bool


@dataclass(frozen=True)
class Report:
    """Result of a trial. device: its name. free, total: bytes of its memory. look_ns: nanoseconds
    of one table read. out_of_reach: why it cannot reach the table. Both None: no table to reach."""

    device: str
    free: int
    total: int
    backends: list[TriedBackend]
    look_ns: int | None = None
    out_of_reach: str | None = None


def try_cpu(trial: Trial) -> Report:
    """Try the CPU, in this process and on its cores."""
    memory = psutil.virtual_memory()
    tried = _try_backends(trial, torch.device("cpu"))
    return Report("CPU", memory.available, memory.total, tried)


def _try_first_gpu(trial: Trial) -> Report:
    """Try the first visible GPU; raises torch's error if there is none."""
    device = torch.device("cuda")
    free, total = torch.cuda.mem_get_info(0)
    look_ns, out_of_reach = None, None
    if trial.table is not None:
        print(f"{_TRIES}the speculation table", flush=True)
        look_ns, out_of_reach = _try_table(Path(trial.table), device)
    print(f"{_TRIES}the draft's attention", flush=True)
    tried = _try_backends(trial, device)
    return Report(torch.cuda.get_device_name(0), free, total, tried, look_ns, out_of_reach)


def _try_backends(trial: Trial, device: torch.device) -> list[TriedBackend]:
    tried: list[TriedBackend] = []
    for backend in trial.backends:
        tried.append(_try_backend(backend, trial.heads.shape(device)))
        if tried[-1].fault is None and not trial.all_backends:
            break
    return tried


def _try_backend(backend: Backend, shape: AttentionShape) -> TriedBackend:
    seconds, fault = [], None
    for _ in range(2):
        began = time.perf_counter()
        fault = find_fault(backend, shape, BLOCK_SIZE)
        seconds.append(time.perf_counter() - began)
    graphs = fault is None and load_backend(backend).graphs
    return TriedBackend(backend, fault, seconds[0], seconds[-1], graphs)


def _try_table(path: Path, device: torch.device) -> tuple[int | None, str | None]:
    from vllm_ssd.protocol.pages import register
    from vllm_ssd.worker.device_client import measure_look_ns

    table = SpeculationTable.open(path)
    try:
        register(table, device)
    except OSError as error:
        return None, str(error)
    return measure_look_ns(table, device), None


def try_gpu(trial: Trial, environment: Mapping[str, str]) -> Report | str:
    """Try the GPU that a process with this environment sees. Returns the last words of that process
    if it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_ssd.tools.check.device_trial"],
            input=msgspec.json.encode(trial),
            env={**os.environ, **absolute_paths(os.environ), **environment},
            capture_output=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S:g} s"
    if done.returncode != 0:
        return last_words(done)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)


def last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why a trial's process failed and in which part, as the end of a sentence. On ROCm, a kernel
    that uses an invalid address ends the process; the stack follows the line with the cause."""
    errors, said = (
        stream.decode(errors="replace").strip().splitlines()
        for stream in (done.stderr, done.stdout)
    )
    faults = [line for line in errors if line.startswith("Memory access fault by GPU")]
    words = (faults or errors or [f"exit status {done.returncode}"])[-1]
    parts = [line for line in said if line.startswith(_TRIES)]
    return f"{words}, {parts[-1]}" if parts else words


def main() -> None:
    """Entry point of a trial's process. Prints the report as its last line, after other output."""
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    report = msgspec.json.encode(_try_first_gpu(trial)).decode()
    print(f"\n{report}", flush=True)
    # Skip the libraries' exit handlers, which can take minutes on GPU machines.
    os._exit(0)


if __name__ == "__main__":
    main()
