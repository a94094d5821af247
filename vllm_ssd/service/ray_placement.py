"""Reserves GPUs in the Ray of vLLM's Ray executor; the draft's GPU is on the node of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ssd.service.own_ray import place

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

RESERVE_S = 60.0  # timeout of a reservation: Ray starts a process for it, which takes seconds


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
            '"draft_device": 0 in --speculative-config'
        ) from error
