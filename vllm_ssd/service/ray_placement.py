"""Where vLLM's Ray executor gives out the GPUs: target and draft on one node, each GPU once."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

RESERVE_S = 60.0  # Ray starts a process for it, which takes seconds


def place_target_by_ray(parallel: ParallelConfig) -> None:
    """Have vLLM connect to its Ray and reserve the target's GPUs, and refuse those of another node.

    It is what the executor does first and does not do twice. Done before anything of ours is
    started, it cannot mistake the draft's Ray for its own, which on ROCm it would look for.
    """
    import ray
    from vllm import envs
    from vllm.v1.executor import ray_utils

    connect: Any = ray_utils.initialize_ray_cluster
    # vLLM 0.32's newer executor says so itself; 0.33 does not ask.
    on_driver = "require_gpu_on_driver" in inspect.signature(connect).parameters
    connect(parallel, **({"require_gpu_on_driver": False} if on_driver else {}))
    group, world_size = parallel.placement_group, parallel.world_size
    if envs.VLLM_RAY_BUNDLE_INDICES:
        indices = [int(index) for index in envs.VLLM_RAY_BUNDLE_INDICES.split(",")]
        bundles = ray_utils.get_bundles_for_indices(group, indices, world_size)
    else:
        bundles = ray_utils.get_bundles_sorted_by_node(group)
    here = ray.get_runtime_context().get_node_id()
    elsewhere = {address for _, node, address in bundles[:world_size] if node != here}
    if elsewhere:
        raise ValueError(
            "the speculative method 'ssd' needs the target's GPUs on the engine's own node and "
            f"Ray chose {', '.join(sorted(elsewhere))}: start vLLM on a node with enough free "
            "GPUs for target and draft"
        )


class GpuHolder:
    """An actor that does nothing but have a GPU, so that Ray gives it to nobody else."""

    def name(self, device_key: str) -> str:
        """The GPU, as CUDA_VISIBLE_DEVICES knows it."""
        import ray

        return str(ray.get_runtime_context().get_accelerator_ids()[device_key][0])


def reserve_gpu_by_ray(platform: Any) -> tuple[Any, str]:
    """A GPU of this node from vLLM's Ray, ours until the holder (first) is forgotten; its name."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    key = platform.ray_device_key
    holder = (
        ray.remote(GpuHolder)
        .options(
            num_cpus=0,
            num_gpus=1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote()
    )
    try:
        return holder, ray.get(holder.name.remote(key), timeout=RESERVE_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnschedulableError) as error:
        raise ValueError(
            "Ray has no free GPU for the draft on the engine's node: leave one free or lower "
            "--tensor-parallel-size, or for development share a GPU of the target with "
            '"draft_device": 0 in --speculative-config'
        ) from error
