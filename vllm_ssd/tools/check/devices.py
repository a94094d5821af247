"""Findings about a device: its memory, the draft's attention on it, its reach of the table."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.registry import Backend, load_backend
from vllm_ssd.draft.attention.self_test import find_fault
from vllm_ssd.draft.model import BLOCK_SIZE
from vllm_ssd.protocol import SpeculationTable
from vllm_ssd.tools.check.findings import Finding, gib
from vllm_ssd.tools.check.trials import TrialFailed, examine_apart

LIMIT_S = 900.0  # timeout of a GPU's trial: compiling FlashInfer's kernels takes minutes
_SDPA = 'write "tree_backend": "sdpa"'


@dataclass(frozen=True)
class DraftMemory:
    """Bytes that a draft needs. weights: None if unknown. kv_cache: most for the KV cache. least:
    one KV block, which the draft needs to start. states: hidden states. of_free: share of the
    memory left by weights and states that the KV cache may use."""

    weights: int | None
    kv_cache: int
    least: int
    states: int = 0
    of_free: float = 1.0


@dataclass(frozen=True)
class Draft:
    """A draft as its device sees it. attention: its shape, on any device. backends: its attention
    backends, the preferred one first. left_out: other backends, with the reason as the end of a
    sentence. memory: None if no draft is known."""

    attention: AttentionShape
    backends: tuple[Backend, ...]
    left_out: tuple[tuple[str, str], ...]
    memory: DraftMemory | None


@dataclass(frozen=True)
class Trial:
    """What to try on a device. name: the device's. draft: the draft that runs there, None if only
    the target does. all_backends: whether to try those after the first sound one, too. table: path
    of the table that the device must reach, None = no table. users: those of "draft" and "target"
    that reach it from there."""

    name: str
    draft: Draft | None
    all_backends: bool = False
    table: str | None = None
    users: tuple[str, ...] = ()


def try_gpu(trial: Trial, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about the GPU that a process with this environment sees, as the draft's does. If the
    process fails, the last one says so."""
    gpu = torch.device("cuda", 0)
    try:
        yield from examine_apart(
            examine_device, trial, gpu, limit_s=LIMIT_S, environment=environment
        )
    except TrialFailed as failure:
        yield Finding(
            "bad",
            "device",
            f"{trial.name} cannot be used ({failure})",
            "end processes that use it exclusively, or install a driver that fits this torch",
        )


def examine_device(trial: Trial, device: torch.device) -> Iterator[Finding]:
    """Findings about a device, which this process uses. Raises torch's error if there is none."""
    graphs = False
    if trial.draft is not None:
        yield from _examine_memory(trial.name, trial.draft.memory, device)
        graphs = yield from _examine_backends(trial.draft, trial.all_backends, device)
    if trial.table is not None:
        yield from _examine_table(trial, Path(trial.table), device, graphs)


def _examine_memory(name: str, need: DraftMemory | None, device: torch.device) -> Iterator[Finding]:
    if device.type == "cpu":
        memory, about = psutil.virtual_memory(), "CPU"
        free, total = memory.available, memory.total
    else:
        free, total = torch.cuda.mem_get_info(device)
        about = torch.cuda.get_device_name(device)
    fact = f"{gib(free)} of {gib(total)} are free on {name} ({about})"
    yield Finding("ok", "draft's device", fact)
    if need is not None:
        yield judge_memory(need, free)


def judge_memory(need: DraftMemory, free: int) -> Finding:
    """Finding about a draft's memory on a device with ``free`` bytes."""
    left = max(free - (need.weights or 0) - need.states, 0)
    cache = min(need.kv_cache, int(need.of_free * left))
    named = "weights of unknown size" if need.weights is None else f"{gib(need.weights)} of weights"
    fact = f"{named}, {gib(need.states)} of hidden states, a KV cache of up to {gib(need.kv_cache)}"
    if cache < need.least:
        return Finding(
            "bad",
            "draft's memory",
            f"{fact}, and {gib(free)} are free",
            "end what else runs there, name a smaller draft, or another device with draft_device",
        )
    if cache < need.kv_cache:
        return Finding(
            "note",
            "draft's memory",
            f"{fact}, of which {gib(cache)} have room: with many long requests at once, some get "
            "no drafts",
            "lower --max-num-seqs or max_model_len in --speculative-config",
        )
    return Finding("ok", "draft's memory", fact)


def _examine_backends(
    draft: Draft, all_backends: bool, device: torch.device
) -> Generator[Finding, None, bool]:
    """Findings about the draft's attention; ssd uses the first sound backend. Returns whether that
    publishes from the GPU, which must then reach the table."""
    shape = replace(draft.attention, device=device)
    used: Backend | None = None
    for backend in draft.backends:
        if used is not None and not all_backends:
            fact = f"{backend}: not tried because {used} is used; --all-backends tries it"
            yield Finding("ok", "attention", fact)
        elif fault := find_fault(backend, shape, BLOCK_SIZE):
            remedy = "nothing to do if another one is right"
            yield Finding("note", "attention", f"{backend} {fault}", remedy)
        else:
            used = used or backend
            chosen = ", is used" if backend == used else ""
            yield Finding("ok", "attention", f"{backend}: right in the self-test{chosen}")
    for name, why in draft.left_out:
        yield Finding("ok", "attention", f"{name} {why}: not used")
    if used is None:
        yield Finding("bad", "attention", "no backend computes correctly", _SDPA)
    return used is not None and load_backend(used).graphs


def _examine_table(
    trial: Trial, path: Path, device: torch.device, graphs: bool
) -> Iterator[Finding]:
    """Findings whether a GPU reaches the table. graphs: the draft publishes from this GPU."""
    from vllm_ssd.protocol.pages import REMEDY, register
    from vllm_ssd.worker.device_client import measure_look_ns

    table = SpeculationTable.open(path)
    problem = ""
    try:
        register(table, device)
        look_ns = measure_look_ns(table, device)
    except OSError as error:
        problem = str(error)
    for user in trial.users:
        name = f"{user}'s table"
        if not problem:
            fact = f"{trial.name} reads it in {look_ns} ns and can write to it"
            yield Finding("ok", name, fact)
            continue
        fact = f"{trial.name} cannot reach it ({problem})"
        if user == "target":
            yield Finding("bad", name, fact, REMEDY)
        elif graphs:
            yield Finding("bad", name, fact, f"{_SDPA}, whose draft publishes from the CPU")
        else:
            yield Finding("ok", name, f"{fact}, and publishes from the CPU")
