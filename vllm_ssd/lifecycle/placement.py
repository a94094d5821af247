"""Which GPU the draft gets, and what its process must be told to see that one only.

vLLM gives the visible GPUs out in order, those of ``--device-ids`` if it is given: worker r of this
host's n-th engine has number n * world_size + r. The draft of E engines comes after all targets, on
number E * world_size. Under the Ray executor Ray gives out the GPUs, so it is asked for one more.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class Placement:
    """device: index among the visible GPUs, or a name for CUDA_VISIBLE_DEVICES. with_target: a
    target runs there too. with_drafts: other drafts run there too."""

    device: int | str
    with_target: bool = False
    with_drafts: bool = False


def local_engines(parallel: ParallelConfig) -> int:
    """Engines on this host, as known while the config is made: the engine core of a dense model
    is told that it is the only one."""
    if parallel.data_parallel_rank_local is not None:
        # Offline, every engine has a process of its own, and none knows how many share the host.
        return parallel.data_parallel_size
    return parallel.data_parallel_size_local


def engine_index(parallel: ParallelConfig) -> int:
    """Which of this host's engines this engine core is, as vLLM itself counts them."""
    index = parallel.data_parallel_rank_local
    return parallel.data_parallel_index if index is None else index


def device_names(draft_device: int | str | None, platform: Any) -> list[str]:
    """The devices that the user named, none if it is None: GPUs as in "4,5", and on CPUs lists of
    cores as in "2-3,6|7", which vLLM separates like this, too. platform: vLLM's."""
    if draft_device is None:
        return []
    return str(draft_device).split("|" if platform.is_cpu() else ",")


def own_draft_name(engines: int, parallel: ParallelConfig, options: Mapping[str, Any]) -> str:
    """A name for the draft service that the ``engines`` engines of this host start, the same for
    all that have these options of ssd's. No service that a user has named is called like this."""
    if engines > 1 and parallel.data_parallel_rank_local is not None:
        # Offline each makes a config. This is where all of them meet, and may do so again.
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
) -> Placement:
    """The place of the draft of this host's engine number ``engine`` of ``engines``, which share
    one unless ``draft_device`` names several devices; ``ValueError`` with a sentence if there is
    none.

    draft_device: the user's option. platform: vLLM's. Not for the Ray executor, unless
    ``draft_device`` says where.
    """
    order = [] if parallel.use_ray else _order(parallel, platform)
    used, free = _divide(order, engines, parallel)
    if draft_device is None:
        number = 0 if engines > 1 else engine
        if len(free) <= number:
            wanted = engines * parallel.world_size
            raise ValueError(
                f"the target uses {wanted} of {len(order)} visible GPUs and its draft needs "
                "1 more: make more visible or lower --tensor-parallel-size, or for "
                f'development share one of the target with "draft_device": {next(iter(order), 0)} '
                "in --speculative-config"
            )
        return Placement(free[number])
    named = named_gpus(draft_device, engines)
    device = named[engine % len(named)]
    index = _visible_index(device, platform)
    return Placement(
        device if index is None else index,
        with_target=index in used,
        with_drafts=named.count(device) > 1,
    )


def target_gpus(engines: int, parallel: ParallelConfig, platform: Any) -> list[int]:
    """Indices among the visible GPUs of those that the targets of this host's engines get, as far
    as there are enough. Not for the Ray executor."""
    return _divide(_order(parallel, platform), engines, parallel)[0]


def _divide(
    order: list[int], engines: int, parallel: ParallelConfig
) -> tuple[list[int], list[int]]:
    """GPUs of the targets, and those that are left."""
    wanted = engines * parallel.world_size
    return order[:wanted], order[wanted:]


def named_gpus(draft_device: int | str | None, engines: int) -> list[str]:
    """The GPUs in ``draft_device``: one, or one per engine of this host; ``ValueError`` if not."""
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
    """Indices of all visible GPUs, in the order in which vLLM gives them out."""
    visible = list(range(platform.device_count()))
    if parallel.assigned_physical_gpu_ids is None:
        return visible
    physical = {platform.visible_device_id_to_physical_device_id(index): index for index in visible}
    first = [physical[gpu] for gpu in parallel.assigned_physical_gpu_ids if gpu in physical]
    return first + [index for index in visible if index not in first]


def _visible_index(device: str, platform: Any) -> int | None:
    """The index of a GPU that the user named; None if vLLM cannot tell it."""
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
    """Environment of a process that is to see this GPU only, whatever Ray would choose for it."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in listed.split(",") if name.strip()]
    name = names[device] if isinstance(device, int) and names else str(device)
    environment = {"CUDA_VISIBLE_DEVICES": name, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    if rocm:  # vLLM refuses to start where the two differ; ROCR's, which counts first, stays
        environment["HIP_VISIBLE_DEVICES"] = name
        environment["RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"] = "1"
        environment["RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES"] = "1"
    return environment
