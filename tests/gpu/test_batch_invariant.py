"""bf16 with vLLM's batch-invariant kernels: a row's logits do not depend on what is beside it, and
so the text is token for token the plain engine's, whatever is verified with it."""

from __future__ import annotations

from benchmarks.common.running import counters
from tests.gpu.settings import OPTIONS, SSD
from tests.support.harness import engine, greedy, own_run_dir, texts

SUBJECTS = ("rivers", "bread", "the moon", "chess", "tides", "clocks", "maps", "salt")
PROMPTS = [f"Explain {subject} to a child." for subject in SUBJECTS]
BATCHES = (1, 8)


def test_same_tokens_in_bf16(models, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    speculation = {**SSD, "k": 5, "f": 2, "model": models[1]}
    results = []
    for extra in ({}, {"speculative_config": speculation}):
        with engine(models[0], **{**OPTIONS, "dtype": "bfloat16", **extra}) as llm:
            results.append(
                [
                    texts(llm.generate(PROMPTS[:count], greedy(128), use_tqdm=False))
                    for count in BATCHES
                ]
            )
            if extra:
                accepted = counters(own_run_dir())["accepted"]
    assert results[0] == results[1]
    assert sum(accepted[1:]) > 0, "no draft was accepted"
