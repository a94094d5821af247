"""The device of a draft: chooses a GPU for it, whose process then sees that GPU only.

vLLM assigns the visible GPUs in order, those of ``--device-ids`` first. Worker r of this host's
n-th engine gets number n * world_size + r. The draft of E engines gets number E * world_size, after
all targets. Under the Ray executor, Ray assigns the GPUs and is asked for one more.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class DraftDevice:
    """Device of a draft. cores: the draft's cores on a CPU machine. gpu: index among the visible
    GPUs or a name for CUDA_VISIBLE_DEVICES; None on a CPU machine. environment: variables of the
    draft's process. of_target: variables of the target's workers. may_share_gpu: the target may
    use the GPU, too. reservation: keeps a GPU that vLLM's Ray has given, while referenced. notes:
    sentences that the user should read."""

    cores: list[int] = field(default_factory=list)
    gpu: int | str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    of_target: dict[str, str] = field(default_factory=dict)
    may_share_gpu: bool = False
    reservation: Any = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The device's name for messages."""
        if self.gpu is not None:
            return f"GPU {self.gpu}"
        cores = ",".join(map(str, self.cores))
        if len(self.cores) > 1 and self.cores == [*range(self.cores[0], self.cores[-1] + 1)]:
            cores = f"{self.cores[0]}-{self.cores[-1]}"
        return f"CPU cores {cores}"


def local_engines(parallel: ParallelConfig) -> int:
    """Number of engines on this host. Call it while the config is made: vLLM later tells the
    engine core of a dense model that it is the only engine."""
    if parallel.data_parallel_rank_local is not None:
        # Offline, each engine has its own process and does not know how many share the host.
        return parallel.data_parallel_size
    return parallel.data_parallel_size_local


def engine_index(parallel: ParallelConfig) -> int:
    """Index of this engine core among this host's engines, counted by vLLM."""
    index = parallel.data_parallel_rank_local
    return parallel.data_parallel_index if index is None else index


def device_names(draft_device: int | str | None, platform: Any) -> list[str]:
    """The devices that the user named; empty for None. GPUs are written as "4,5", and lists of
    cores as "2-3,6|7", with vLLM's own separator. platform: vLLM's current platform."""
    if draft_device is None:
        return []
    return str(draft_device).split("|" if platform.is_cpu() else ",")


def own_draft_name(engines: int, parallel: ParallelConfig, options: Mapping[str, Any]) -> str:
    """Name of the draft service that the ``engines`` engines of this host start. Engines with equal
    ``options`` of ssd get one name. A user cannot give a service such a name."""
    if engines > 1 and parallel.data_parallel_rank_local is not None:
        # Offline each engine makes a config. All use one master address, and later groups may, too.
        place = f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_master_port}"
        common = f"{place} {sorted(options.items())}"
        return f"dp:{hashlib.sha256(common.encode()).hexdigest()[:12]}"
    return f"own:{os.getpid()}-{secrets.token_hex(4)}"  # the process that starts them


def place_draft(
    draft_device: int | str | None,
    engines: int,
    parallel: ParallelConfig,
    platform: Any,
    engine: int,
) -> DraftDevice:
    """Choose the GPU for the draft of engine number ``engine`` of this host's ``engines``. They
    share one draft unless ``draft_device`` names several devices. Raises ``ValueError`` with a
    sentence if no GPU is left.

    draft_device: the user's option; required under the Ray executor. platform: vLLM's own.
    """
    order = [] if parallel.use_ray else _order(parallel, platform)
    wanted = engines * parallel.world_size
    used, free = order[:wanted], order[wanted:]
    if draft_device is None:
        number = 0 if engines > 1 else engine
        if len(free) <= number:
            raise ValueError(
                f"the target uses {wanted} of {len(order)} visible GPUs and its draft needs "
                "1 more: make more visible or lower --tensor-parallel-size, or for "
                f'development share one of the target with "draft_device":{next(iter(order), 0)} '
                "in --speculative-config"
            )
        return _one_gpu(free[number], platform)
    named = named_gpus(draft_device, engines)
    device = named[engine % len(named)]
    index = _visible_index(device, platform)
    found = _one_gpu(device if index is None else index, platform)
    twice = (
        "draft_device names one GPU for the drafts of several engines, which share its time and "
        "its memory: name it once, and they share the draft"
    )
    notes = (twice,) if named.count(device) > 1 and engine == 0 else ()
    return replace(found, may_share_gpu=index in used, notes=notes)


def _one_gpu(gpu: int | str, platform: Any) -> DraftDevice:
    return DraftDevice(gpu=gpu, environment=gpu_environment(gpu, platform.is_rocm()))


def target_gpus(engines: int, parallel: ParallelConfig, platform: Any) -> list[int]:
    """Indices of the visible GPUs that this host's targets use. Not for the Ray executor."""
    return _order(parallel, platform)[: engines * parallel.world_size]


def named_gpus(draft_device: int | str, engines: int) -> list[str]:
    """The GPUs in ``draft_device``: one, or one per engine of this host; else ``ValueError``."""
    named = str(draft_device).split(",")
    if not all(_GPU_NAME.fullmatch(name) for name in named):
        raise ValueError(
            "draft_device must be the index or the UUID of a visible GPU, or one for each data "
            f'parallel engine as in "4,5", not {draft_device!r}'
        )
    if len(named) not in (1, max(engines, 1)):
        raise ValueError(
            f"draft_device {draft_device!r} names {len(named)} GPUs and this host has "
            f"{engines} engine{'s' if engines != 1 else ''}: "
            "name one GPU for the draft of each, or one for a draft that all share"
        )
    return named


def _order(parallel: ParallelConfig, platform: Any) -> list[int]:
    """Indices of all visible GPUs, in the order in which vLLM assigns them."""
    visible = list(range(platform.device_count()))
    if parallel.assigned_physical_gpu_ids is None:
        return visible
    physical = {platform.visible_device_id_to_physical_device_id(index): index for index in visible}
    first = [physical[gpu] for gpu in parallel.assigned_physical_gpu_ids if gpu in physical]
    return first + [index for index in visible if index not in first]


def _visible_index(device: str, platform: Any) -> int | None:
    """Index of the GPU that the user named, None if vLLM cannot tell; ``ValueError`` if hidden."""
    visible = platform.device_count()
    if device.isdecimal():
        if int(device) >= visible:
            raise ValueError(
                f"draft_device {device} does not exist: choose from 0 to {visible - 1}, the "
                "visible GPUs"
            )
        return int(device)
    if device.startswith("MIG-") or not platform.is_cuda():
        return None
    for index in range(visible):
        if platform.get_device_uuid(index).startswith(device):
            return index
    raise ValueError(
        f"draft_device {device} is not the UUID of a visible GPU: choose one that "
        "CUDA_VISIBLE_DEVICES lists and nvidia-smi -L shows"
    )


def gpu_environment(device: int | str, rocm: bool) -> dict[str, str]:
    """Environment variables of a process that sees this GPU only, whichever GPU Ray assigns."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in listed.split(",") if name.strip()]
    name = names[device] if isinstance(device, int) and names else str(device)
    environment = {"CUDA_VISIBLE_DEVICES": name, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    if rocm:  # vLLM requires both lists to agree; ROCR_VISIBLE_DEVICES applies first and stays
        environment["HIP_VISIBLE_DEVICES"] = name
        environment["RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"] = "1"
        environment["RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES"] = "1"
    return environment
