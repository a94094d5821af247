"""Checks whether vLLM has the memory that it asks for on CPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_ssd.tools.check.findings import GIB, Finding, gib, refusal


def examine_target_memory(config: VllmConfig | None = None) -> Iterator[Finding]:
    """Finding about the memory that vLLM asks for on CPUs; none on GPUs. vLLM itself says so only
    in the middle of a start. config: vLLM's defaults if left out."""
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
