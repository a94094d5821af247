"""Chooses the cores or the GPU of a draft, and which cores are left to its targets.

Where vLLM's executor is Ray's, Ray gives out the GPUs; the draft's is on the node of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ssd.service.cores import available_cores, parse_cores
from vllm_ssd.service.own_ray import place
from vllm_ssd.service.placement import DraftDevice, engine_index, gpu_environment, place_draft

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

SHARED_KV_CACHE_GIB = 1.0  # for a draft that shares its device's memory
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM reads the cores of its workers from it
RESERVE_S = 60.0  # timeout of a reservation: Ray starts a process for it, which takes seconds


def choose_device(vllm_config: VllmConfig, platform: Any) -> DraftDevice:
    """Choose the draft's device. On CPUs its ``of_target`` binds the target's workers to the other
    cores. platform: vLLM's current platform."""
    return _choose_cores(vllm_config) if platform.is_cpu() else _choose_gpu(vllm_config, platform)


def choose_lone_device(vllm_config: VllmConfig, platform: Any) -> DraftDevice:
    """Return the device that a config of ``vllm-ssd draft`` names; this command runs no target."""
    config: Any = vllm_config.speculative_config
    if platform.is_cpu():
        cores = parse_cores(str(config.draft_device))
        return DraftDevice(cores, environment=_threads(cores))
    engines = 0  # whose targets would limit the draft's memory
    return place_draft(config.draft_device, engines, vllm_config.parallel_config, platform, 0)


def _choose_gpu(vllm_config: VllmConfig, platform: Any) -> DraftDevice:
    """Choose the draft's GPU. Does not initialize CUDA, because workers may be forked later."""
    config: Any = vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    notes = []
    if parallel.use_ray:
        place_target_by_ray(parallel)
        if config.draft_device is None:
            reservation, name = reserve_gpu_by_ray(platform)
            environment = gpu_environment(name, platform.is_rocm())
            return DraftDevice([], name, environment, reservation=reservation)
        notes.append(
            f"Ray does not know that the draft runs on draft_device {config.draft_device} and may "
            "give this GPU to the target too, which is for development only: leave draft_device "
            "out to let Ray choose a GPU for the draft alone"
        )
    engine = engine_index(parallel)
    device = place_draft(config.draft_device, config.engines, parallel, platform, engine)
    if device.may_share_gpu:
        notes.append(
            f"draft_device {device.gpu} is a GPU of the target: both share its time and its "
            "memory, which is for development only, and --gpu-memory-utilization must leave room "
            f"for the draft's weights and its {config.draft_kv_cache_gib or SHARED_KV_CACHE_GIB:g} "
            "GiB of KV cache (draft_kv_cache_gib)"
        )
    may_share = device.may_share_gpu or parallel.use_ray
    return replace(device, may_share_gpu=may_share, notes=(*notes, *device.notes))


def _choose_cores(vllm_config: VllmConfig) -> DraftDevice:
    config: Any = vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    bind = os.environ.get(_BINDING, "auto")
    return split_cores(
        available_cores(),
        parallel.world_size,
        None if config.draft_device is None else str(config.draft_device),
        None if bind in ("auto", "nobind") else bind,
        engine_index(parallel),
        config.engines,
    )


def split_cores(
    available: Sequence[int],
    ranks: int,
    draft_device: str | None,
    bind: str | None,
    engine: int = 0,
    engines: int = 1,
) -> DraftDevice:
    """Divide the ``available`` cores between the draft and the targets' workers: ``ranks`` workers
    in each of ``engines`` engines. Returns the split for engine number ``engine``. Raises
    ``ValueError`` for a malformed list.

    draft_device: the user's cores for the draft that all engines share, or one list for each
    engine's draft, separated by ``|``. bind: the user's thread binding of the targets, one list
    per rank, separated by ``|``, or None. By default the draft takes a quarter of the cores, at
    least one. It takes fewer if a target worker would otherwise have to share a core.
    """
    try:
        bound = [] if bind is None else [parse_cores(part) for part in bind.split("|")]
    except ValueError as error:
        raise ValueError(f"{_BINDING}: {error}") from None
    if draft_device is not None:
        drafts = [parse_cores(part) for part in draft_device.split("|")]
    elif bind is None:
        spare = min(len(available) // 4, len(available) - ranks * engines)
        drafts = [list(available[-max(1, spare) :])]
    else:
        drafts = [_without(available, bound)]
    draft = drafts[engine % len(drafts)] or list(available)
    if bind is not None:
        return _on_cores(draft, any(core in part for part in bound for core in draft))
    free = _without(available, drafts)
    left = _share(free, engine, engines) or free or list(available)
    shares = [_share(left, rank, ranks) for rank in range(ranks)]
    shared = not free or len(free) < engines or not all(shares)
    parts = [",".join(map(str, mine or left)) for mine in shares]
    # One copy per engine: vLLM indexes the parts by a rank that counts the ranks of all engines.
    return _on_cores(draft, shared, {_BINDING: "|".join(parts * engines)})


def _on_cores(
    draft: list[int], shared: bool, of_target: dict[str, str] | None = None
) -> DraftDevice:
    few = ("too few cores: target and draft share some, and will be slow",) if shared else ()
    return DraftDevice(draft, None, _threads(draft), of_target or {}, notes=few)


def _without(cores: Sequence[int], taken: Iterable[Sequence[int]]) -> list[int]:
    """The cores that are in none of the ``taken`` lists."""
    gone = {core for part in taken for core in part}
    return [core for core in cores if core not in gone]


def _share(cores: Sequence[int], number: int, of: int) -> list[int]:
    """Part ``number`` of ``of`` parts of about the same size; empty if there are too few cores."""
    return list(cores[number * len(cores) // of : (number + 1) * len(cores) // of])


def set_variables(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set environment variables of this process, None = unset, and return the former values."""
    former = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return former


def _threads(cores: list[int]) -> dict[str, str]:
    """Environment variables of a process that runs on these cores."""
    return {"OMP_NUM_THREADS": str(len(cores))}


def place_target_by_ray(parallel: ParallelConfig) -> None:
    """Let vLLM connect to its Ray and reserve the target's GPUs. Raises ``ValueError`` if rank 0 is
    not on this node: only rank 0 reads the table, and tells the other ranks.

    The executor would do this later and does not repeat it. Call this before the draft's Ray is
    started: on ROCm, vLLM would otherwise connect to that Ray by mistake."""
    import ray
    from vllm import envs
    from vllm.v1.executor import ray_utils

    ray_utils.initialize_ray_cluster(parallel)
    group, world_size = parallel.placement_group, parallel.world_size
    if envs.VLLM_RAY_BUNDLE_INDICES:
        indices = [int(index) for index in envs.VLLM_RAY_BUNDLE_INDICES.split(",")]
        bundles = ray_utils.get_bundles_for_indices(group, indices, world_size)
    else:
        bundles = ray_utils.get_bundles_sorted_by_node(group)
    _, node, address = bundles[0]
    if node != ray.get_runtime_context().get_node_id():
        raise ValueError(
            "the speculative method 'ssd' needs rank 0 of the target on the engine's own node and "
            f"Ray chose {address}: start vLLM on a node with free GPUs for target and draft"
        )


class GpuHolder:
    """An actor that only holds a GPU, so that Ray does not assign it to another task."""

    def name(self, device_key: str) -> str:
        """The GPU's name for CUDA_VISIBLE_DEVICES. device_key: Ray's name for this kind of GPU."""
        import ray

        return str(ray.get_runtime_context().get_accelerator_ids()[device_key][0])


def reserve_gpu_by_ray(platform: Any) -> tuple[Any, str]:
    """Reserve a GPU of this node in vLLM's Ray. Returns an actor that holds the GPU while it is
    referenced, and the GPU's name for CUDA_VISIBLE_DEVICES. Raises ``ValueError`` if no GPU is
    free."""
    import ray

    holder = place(GpuHolder, num_gpus=1).remote()
    try:
        name = holder.name.remote(platform.ray_device_key)
        return holder, ray.get(name, timeout=RESERVE_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnschedulableError) as error:
        raise ValueError(
            "Ray has no free GPU for the draft on the engine's node: leave one free or lower "
            "--tensor-parallel-size, or for development share a GPU of the target with "
            '"draft_device":0 in --speculative-config'
        ) from error
