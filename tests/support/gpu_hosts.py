"""Hosts with GPUs and engines on them, as far as placing a draft goes."""

from types import SimpleNamespace
from typing import Any

from vllm_ssd.config.ssd_config import SSDConfig

CPU = SimpleNamespace(is_cpu=lambda: True, is_rocm=lambda: False)  # a platform


def gpus(count: int, rocm: bool = False) -> SimpleNamespace:
    """A platform with ``count`` visible GPUs, the first of which is the machine's fifth."""
    return SimpleNamespace(
        is_cpu=lambda: False,
        is_cuda=lambda: not rocm,
        is_rocm=lambda: rocm,
        device_count=lambda: count,
        get_device_uuid=lambda index: f"GPU-0000{index}",
        visible_device_id_to_physical_device_id=lambda index: index + 4,
        ray_device_key="GPU",
    )


def parallel(
    tp: int, engine: int | None = 0, ids: list[int] | None = None, **fields
) -> SimpleNamespace:
    """A parallel config: the engine's number on its host, and the GPUs of ``--device-ids``."""
    return SimpleNamespace(
        world_size=tp,
        data_parallel_rank_local=engine,
        data_parallel_index=engine,
        assigned_physical_gpu_ids=ids,
        **{"use_ray": False, "placement_group": "the group"} | fields,
    )


def engine(target: SimpleNamespace, **options: Any) -> Any:
    """The config of an engine whose target is ``parallel``, with these options."""
    return SimpleNamespace(
        # Sampled drafts would ask for the vocabulary of a target that is not here.
        speculative_config=SSDConfig(k=2, f=1, draft_sample_method="greedy", **options),
        parallel_config=target,
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        model_config=SimpleNamespace(seed=0, served_model_name="target"),
    )
