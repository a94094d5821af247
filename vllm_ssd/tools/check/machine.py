"""Tries on this machine what a start would use: the table, the draft's device and attention."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from vllm.config import ParallelConfig
from vllm.platforms import current_platform

from vllm_ssd.config.default_drafts import default_k_and_f
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.registry import BACKENDS, load_backend, resolve_tree_backends
from vllm_ssd.draft.attention.self_test import find_fault
from vllm_ssd.draft.model import BLOCK_SIZE
from vllm_ssd.service.cores import available_cores
from vllm_ssd.service.draft_device import split_cores
from vllm_ssd.service.errors import first_sentence
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.service.placement import place_draft, target_gpus
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape
from vllm_ssd.tools.check.engine import Subject
from vllm_ssd.tools.check.findings import Finding, gib, refusal, say_wait

_CPU, _SDPA = torch.device("cpu"), 'write "tree_backend":"sdpa"'


def subject_without_target() -> Subject:
    """Subject for one engine on one device, with the attention of Llama-3.2-1B and the options'
    defaults. ``ValueError`` if no device is left for the draft."""
    parallel = ParallelConfig()
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        device = split_cores(available_cores(), 1, None, None)
    else:
        device = place_draft(None, 1, parallel, current_platform, 0)
    attention = AttentionShape(16, 32, 8, 64, 64**-0.5, torch.bfloat16, _CPU)
    k, f = default_k_and_f(None, None, on_cpu)
    table = TableShape(slots=256, k=k, branches=f * (k + 1), top_m=32)
    backends = resolve_tree_backends("auto", None, current_platform)
    return Subject(parallel, device, table, attention, backends)


def examine_machine(subject: Subject) -> Iterator[Finding]:
    """Make the table for a moment, and use the devices as target and draft would."""
    try:
        files = OwnFiles(subject.table, TableOwner())
    except RuntimeError as error:
        yield refusal("shared memory", error)
        return
    try:
        path, size = files.table.path, subject.table.size / 2**20
        free = gib(shutil.disk_usage(path.parent).free)
        fact = f"{free} are free in {path.parent}; the speculation table takes {size:.1f} MiB"
        yield Finding("ok", "shared memory", fact)
        yield from _examine_devices(subject, path)
    finally:
        files.remove()


def _examine_devices(subject: Subject, table: Path) -> Iterator[Finding]:
    device = subject.device
    if subject.parallel.use_ray:
        fact = "vLLM's Ray will choose it, on the engine's node: it is not tried here"
        yield Finding("ok", "draft's device", fact)
        return
    if device.gpu is None:
        yield from examine_draft(subject, _CPU)
        return
    if isinstance(device.gpu, int):
        yield from _use_gpu(subject, table, device.gpu, "draft")
    else:  # such as a MIG device, which only a process of its own sees
        yield Finding("ok", "draft's device", f"{device} has no number: it is not tried here")
    # Only the first GPU of the target looks drafts up.
    first, *_ = target_gpus(1, subject.parallel, current_platform)
    yield from _use_gpu(subject, table, first, "target")


def _use_gpu(subject: Subject, table: Path, gpu: int, user: str) -> Iterator[Finding]:
    name, device, reads = f"GPU {gpu}", torch.device("cuda", gpu), user == "target"
    say_wait(f"trying the {user}'s {name}: seconds, or minutes to compile kernels for it")
    try:
        torch.cuda.set_device(device)
        if user == "draft":
            reads = yield from examine_draft(subject, device)
        if reads:
            yield examine_table(table, device, name, user)
    except Exception as error:  # drivers and torch raise many kinds
        fact = f"{name} cannot be used ({first_sentence(error)})"
        remedy = "end processes that use it exclusively, or install a driver that fits this torch"
        yield Finding("bad", f"{user}'s device", fact, remedy)


def examine_draft(subject: Subject, device: torch.device) -> Generator[Finding, None, bool]:
    """Findings about the draft's memory and attention on its device; ssd uses the first backend
    that is right. Returns whether that publishes from the GPU, which must then reach the table."""
    name = str(subject.device)
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    else:
        free, total = torch.cuda.mem_get_info(device)
        name += f" ({torch.cuda.get_device_name(device)})"
    yield Finding("ok", "draft's device", f"{gib(free)} of {gib(total)} are free on {name}")
    if subject.memory is not None:
        yield subject.memory.judge(free)
    for other, backend in BACKENDS.items():
        if why := backend.obstacle(subject.draft, current_platform):
            yield Finding("ok", "attention", f"{other} {why}: not used")
    shape = replace(subject.attention, device=device)
    for used in subject.backends:
        fault = find_fault(used, shape, BLOCK_SIZE)
        if fault is None:
            yield Finding("ok", "attention", f"{used}: right in the self-test, is used")
            return load_backend(used).graphs
        remedy = "nothing to do if another one is right"
        yield Finding("note", "attention", f"{used} {fault}", remedy)
    yield Finding("bad", "attention", "no backend computes correctly", _SDPA)
    return False


def examine_table(path: Path, device: torch.device, name: str, user: str) -> Finding:
    """Finding whether the GPU of the draft or the target reaches the table."""
    from vllm_ssd.table.pages import REMEDY, register
    from vllm_ssd.worker.device_client import measure_look_ns

    table = SpeculationTable.open(path)
    try:
        register(table, device)
        fact = f"{name} reads it in {measure_look_ns(table, device)} ns and can write to it"
        return Finding("ok", f"{user}'s table", fact)
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        most = "none" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.1f} MiB"
        fact = f"{name} cannot reach it ({error}; limit of locked memory: {most})"
        remedy = REMEDY if user == "target" else f"{_SDPA}, whose draft publishes from the CPU"
        return Finding("bad", f"{user}'s table", fact, remedy)
