"""A target whose KV cache is in fp8. The draft's own stays in 16 or 32 bits."""

import pytest
import torch

from benchmarks.common.running import counters
from tests.support.features.prompts import LONG, SHORT
from tests.support.harness import LIGHT, SSD, engine, greedy, own_run_dir, texts

PROMPTS = [SHORT, LONG, *(f"Explain {subject} to a child." for subject in ("rivers", "bread"))]


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="vLLM's fp8 KV cache on CPUs needs AVX-512",
)
def test_same_texts(target, draft):
    """As of requests that have drafting turned off, whose rounds have one token each."""
    speculation = {**SSD, **LIGHT, "k": 3, "f": 1, "model": draft}
    undrafted = greedy(48, extra_args={"ssd": 0})
    with engine(target, kv_cache_dtype="fp8", speculative_config=speculation) as llm:
        expected = texts(llm.generate(PROMPTS, undrafted, use_tqdm=False))
        assert counters(own_run_dir())["rounds"] == 0
        assert llm.reset_prefix_cache()
        assert texts(llm.generate(PROMPTS, greedy(48), use_tqdm=False)) == expected
        accepted = counters(own_run_dir())["accepted"]
    assert sum(accepted[1:]) > 0, "no draft was accepted"
