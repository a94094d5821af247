"""What vLLM asks for on CPUs."""

import pytest
from vllm.utils import cpu_resource_utils

from tests.support.gpu_hosts import gpus
from vllm_ssd.tools.check import target_memory
from vllm_ssd.tools.check.target_memory import examine_target_memory


@pytest.mark.parametrize(
    "free_gib, space, state, asked",
    [
        (18, None, "bad", "18.4 GiB"),
        (19, None, "ok", "18.4 GiB"),
        (18, "1", "ok", "1.0 GiB"),
        (18, "19", "bad", "19.0 GiB"),
    ],
)
def test_vllm_on_cpus_wants_most_of_the_memory(monkeypatch, free_gib, space, state, asked):
    """0.92 of 20 GiB must be free, unless the size of the KV cache is set."""
    node = cpu_resource_utils.MemoryNodeInfo(20 * 2**30, free_gib * 2**30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda _: node)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    (found,) = examine_target_memory()
    assert found.state == state and f"asks for {asked}" in found.fact
    assert ("VLLM_CPU_KVCACHE_SPACE" in found.remedy) == (state == "bad")


def test_vllm_on_gpus_asks_for_no_host_memory(monkeypatch):
    monkeypatch.setattr(target_memory, "current_platform", gpus(1))
    assert not list(examine_target_memory())
