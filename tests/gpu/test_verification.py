"""Adaptive verification on GPUs: vLLM verifies, of all rows' drafts, those that pay."""

from __future__ import annotations

import pytest

from benchmarks.common.running import counters
from tests.gpu.settings import OPTIONS, SSD
from tests.support.harness import engine, greedy, own_run_dir, texts
from vllm_ssd.metrics import describe

SUBJECTS = ("rivers", "bread", "the moon", "chess", "tides", "clocks", "maps", "salt")
PROMPTS = [f"{verb} {s}." for s in SUBJECTS for verb in ("Explain", "Praise", "Draw", "List")]
BATCHES = (1, 2, 7, 32)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_same_tokens_with_rows_trimmed(models, method):
    """Nothing is waited for, so that rows have few drafts, or only guesses, and are trimmed. How
    many drafts are left out depends on what else the GPUs do: it is printed."""
    target, draft = models
    options = {**OPTIONS, "dtype": "float32", "max_num_seqs": 32}
    speculation = {**SSD, "k": 5, "f": 2, "model": draft, "on_miss": "skip"}
    speculation["draft_sample_method"] = method
    results = []
    for extra in ({}, {"speculative_config": speculation}):
        with engine(target, **options, **extra) as llm:
            results.append(
                [
                    texts(llm.generate(PROMPTS[:count], greedy(64), use_tqdm=False))
                    for count in BATCHES
                ]
            )
            if extra:
                counted = counters(own_run_dir())
    print(describe(counted), counted)
    for count, plain, ssd in zip(BATCHES, *results):
        assert plain == ssd, count
    assert 0 < sum(counted["taken"]) <= sum(counted["verified"]) <= counted["drafts"]
