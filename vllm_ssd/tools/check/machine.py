"""Checks the machine for one engine: memory, the table, the devices and the draft's Ray."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator

import torch
from vllm.config import ParallelConfig
from vllm.platforms import current_platform

from vllm_ssd.lifecycle.cores import available_cores, split_cores
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.lifecycle.placement import DraftDevice, gpu_environment, place_draft, target_gpus
from vllm_ssd.protocol import TableOwner, TableShape
from vllm_ssd.tools.check.devices import LIMIT_S, Trial, examine_device, try_gpu
from vllm_ssd.tools.check.engine import Subject, usual_subject
from vllm_ssd.tools.check.findings import Finding, gib, refusal, say_wait
from vllm_ssd.tools.check.ray_trial import try_ray


def subject_without_target() -> Subject:
    """Subject for one engine on one device; ``ValueError`` if no device is left for its draft."""
    parallel = ParallelConfig()
    if current_platform.is_cpu():
        cores = split_cores(available_cores(), 1, None, None)
        return usual_subject(DraftDevice(cores.draft), parallel)
    return usual_subject(place_draft(None, 1, parallel, current_platform, 0), parallel)


def examine_machine(subject: Subject, all_backends: bool) -> Iterator[Finding]:
    """Make or start these for a moment: the table, the draft's attention, the draft's Ray."""
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
        yield from _try_devices(subject, str(path), all_backends)
        yield from try_ray(files.run_dir)
    finally:
        files.remove()


def examine_locked_memory(shape: TableShape) -> Finding:
    """Finding about the limit of locked memory. GPUs register the table's pages, and some drivers
    count these as locked."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "locked memory", "no limit")
    fact = f"the limit is {limit / 2**20:.1f} MiB"
    size = shape.size
    if limit >= size:
        return Finding("ok", "locked memory", fact)
    return Finding(
        "note",
        "locked memory",
        f"{fact}, and a GPU locks the table's {size / 2**20:.1f} MiB, which some drivers count",
        "if the table below is out of reach: ulimit -l unlimited, in a container --ulimit "
        "memlock=-1",
    )


def _try_devices(subject: Subject, table: str, all_backends: bool) -> Iterator[Finding]:
    device = subject.device
    if device is None:
        fact = "vLLM's Ray will choose it, on the engine's node: it is not tried here"
        yield Finding("ok", "draft's device", fact)
    elif device.gpu is None:
        trial = Trial(f"cores {', '.join(map(str, device.cores))}", subject.draft, all_backends)
        yield from examine_device(trial, torch.device("cpu"))
    else:
        yield examine_locked_memory(subject.table)
        yield from _try_gpus(subject, device, table, all_backends)


def _try_gpus(
    subject: Subject, device: DraftDevice, table: str, all_backends: bool
) -> Iterator[Finding]:
    # Only the first GPU of the target looks drafts up.
    first, *_ = target_gpus(subject.engines, subject.parallel, current_platform)
    name, shared = f"GPU {device.gpu}", first == device.gpu
    users = ("draft", "target") if shared else ("draft",)
    trial = Trial(name, subject.draft, all_backends, table, users)
    trials = [(trial, device.environment)]
    if not shared:
        trial = Trial(f"GPU {first}", None, table=table, users=("target",))
        trials.append((trial, gpu_environment(first, current_platform.is_rocm())))
    for trial, environment in trials:
        limit = f"at most {LIMIT_S:g} s, most of it to compile kernels that no cache has"
        say_wait(f"trying the {trial.users[0]}'s {trial.name}: {limit}")
        yield from try_gpu(trial, environment)
