"""Chooses the cores or the GPU of an engine's draft. Runs in the engine core."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ssd.service.cores import available_cores, parse_cores, split_cores
from vllm_ssd.service.placement import DraftDevice, engine_index, gpu_environment, place_draft
from vllm_ssd.service.ray_placement import place_target_by_ray, reserve_gpu_by_ray

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SHARED_KV_CACHE_GIB = 1.0  # for a draft that shares its device's memory
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM reads the cores of its workers from it


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
    split = split_cores(
        available_cores(),
        parallel.world_size,
        None if config.draft_device is None else str(config.draft_device),
        None if bind in ("auto", "nobind") else bind,
        engine_index(parallel),
        config.engines,
    )
    few = "too few cores: target and draft share some, and will be slow"
    return DraftDevice(
        split.draft,
        environment=_threads(split.draft),
        of_target={} if split.target is None else {_BINDING: split.target},
        notes=(few,) if split.shared else (),
    )


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
