"""A target whose KV cache is in fp8. The draft's own stays in 16 or 32 bits."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common.running import counters
from tests.support.features.prompts import LONG, SHORT
from tests.support.harness import SSD, engine, greedy, own_run_dir, texts

PROMPTS = [SHORT, LONG, *(f"Explain {subject} to a child." for subject in ("rivers", "bread"))]


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="vLLM's fp8 KV cache on CPUs needs AVX-512",
)
def test_same_texts(target, draft):
    texts_of = []
    for extra in ({}, {"speculative_config": {**SSD, "k": 3, "f": 1, "model": draft}}):
        with engine(target, kv_cache_dtype="fp8", **extra) as llm:
            texts_of.append(texts(llm.generate(PROMPTS, greedy(48), use_tqdm=False)))
            if extra:
                accepted = counters(own_run_dir())["accepted"]
    assert texts_of[0] == texts_of[1]
    assert sum(accepted[1:]) > 0, "no draft was accepted"
