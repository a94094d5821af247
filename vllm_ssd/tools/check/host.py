"""Checks the host's memory: free memory, free shared memory, and the limit of locked memory."""

from __future__ import annotations

import math
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vllm_ssd.lifecycle.own_table import make_table
from vllm_ssd.protocol import SpeculationTable, TableShape
from vllm_ssd.protocol.rundir import table_path
from vllm_ssd.tools.check.findings import GIB, Finding, gib, refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Chunks of the queue between vLLM's engine core and its workers. vLLM allocates all of them.
_QUEUE_CHUNKS = 10


def examine_memory() -> Finding:
    """Finding about host memory: it holds weights on their way to a GPU, both models on CPUs."""
    memory = psutil.virtual_memory()
    return Finding("ok", "host memory", f"{gib(memory.available)} of {gib(memory.total)} are free")


def examine_target_memory(config: VllmConfig | None = None) -> Iterator[Finding]:
    """Finding about the memory that vLLM asks for on CPUs; none on GPUs. config: vLLM's defaults if
    left out."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    try:
        cache = (config or VllmConfig()).cache_config
    except ValueError as error:  # of an environment variable
        yield refusal("target's memory", error)
        return
    free = node.available_memory
    asked, why = cache.kv_cache_memory_bytes, "set for the KV cache, besides weights"
    if asked is None:
        share = cache.gpu_memory_utilization
        asked = math.ceil(share * node.total_memory)
        why = f"{share:g} of {gib(node.total_memory)}, --gpu-memory-utilization"
    fact = f"vLLM asks for {asked / GIB:.1f} GiB ({why}), and {free / GIB:.1f} GiB are free"
    if asked <= free:
        yield Finding("ok", "target's memory", fact)
        return
    yield Finding(
        "bad",
        "target's memory",
        f"{fact}: vLLM would refuse to start",
        "set the environment variable VLLM_CPU_KVCACHE_SPACE to the whole GiB of the KV cache, "
        "such as 1, or end what else runs here",
    )


def examine_shared_memory(run_dir: Path, shape: TableShape, has_queue: bool) -> Iterator[Finding]:
    """Findings about shared memory. Makes the speculation table of a run directory and leaves it
    there. has_queue: whether vLLM has worker processes."""
    folder = table_path(run_dir).parent
    try:
        make_table(run_dir, shape)
    except RuntimeError as error:
        yield refusal("shared memory", error)
        return
    free = shutil.disk_usage(folder).free
    fact = f"{gib(free)} are free in {folder}"
    needed = _queue_bytes() if has_queue else 0
    if free < needed:
        yield Finding(
            "bad",
            "shared memory",
            f"{fact}, and vLLM's worker processes ask for {gib(needed)}",
            "free some, or in a container raise --shm-size, or share the host's with --ipc=host",
        )
        return
    size = SpeculationTable.size_of(shape) / 2**20
    yield Finding("ok", "shared memory", f"{fact}; the speculation table takes {size:.1f} MiB")


def _queue_bytes() -> int:
    from vllm import envs

    return int(envs.VLLM_MQ_MAX_CHUNK_BYTES_MB) * 2**20 * _QUEUE_CHUNKS


def examine_locked_memory(shape: TableShape) -> Finding:
    """Finding about the limit of locked memory. GPUs register the table's pages, and some drivers
    count these as locked."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "locked memory", "no limit")
    fact = f"the limit is {limit / 2**20:.1f} MiB"
    size = SpeculationTable.size_of(shape)
    if limit >= size:
        return Finding("ok", "locked memory", fact)
    return Finding(
        "note",
        "locked memory",
        f"{fact}, and a GPU locks the table's {size / 2**20:.1f} MiB, which some drivers count",
        "if the table below is out of reach: ulimit -l unlimited, in a container --ulimit "
        "memlock=-1",
    )
