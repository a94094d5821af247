"""Hosts with GPUs and engines on them, as far as placing a draft goes."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_ssd.config import SSDConfig
from vllm_ssd.target.launch import DraftLauncher


def gpus(count: int, rocm: bool = False) -> SimpleNamespace:
    """A platform with so many visible GPUs, the first of which is the machine's fifth."""
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
        assigned_physical_gpu_ids=ids,
        **{"use_ray": False, "placement_group": "the group"} | fields,
    )


def launcher(target, **options) -> DraftLauncher:
    """The launcher of an engine whose target is ``parallel``, with these options."""
    scheduler = SimpleNamespace(max_num_seqs=2)
    # Sampled drafts would ask for the vocabulary of a target that is not here.
    config = SSDConfig(k=2, f=1, draft_sample_method="greedy", **options)
    return DraftLauncher(
        SimpleNamespace(
            speculative_config=config,
            parallel_config=target,
            scheduler_config=scheduler,
            model_config=SimpleNamespace(seed=0),
        )
    )
