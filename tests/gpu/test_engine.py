"""The whole engine on GPUs: the target on one, the draft on another, Model Runner V2."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from benchmarks.running import counters, leftovers
from tests.engine.harness import engine, greedy, own_run_dir, texts, wait_for
from vllm_ssd.metrics import describe

OPTIONS = {
    "max_model_len": 1024,
    "gpu_memory_utilization": 0.3,
    # Given, not measured: other engines may come and go on the same GPUs.
    "kv_cache_memory_bytes": 2**30,
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
PROMPTS = [f"Explain {s} to a child." for s in ("rivers", "bread", "the moon", "chess", "tides")]


FOLDER = Path(os.environ.get("SSD_TEST_MODELS", Path(__file__).parents[2] / ".models"))


@pytest.fixture(scope="module")
def models() -> tuple[str, str]:
    from benchmarks.standin import ensure_draft, ensure_smollm2

    return str(ensure_smollm2(FOLDER)), str(ensure_draft(FOLDER))


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
def test_same_tokens_under_tensor_parallelism(models):
    """Two target ranks: only the first looks into the table, both verify the same drafts."""
    from benchmarks.standin import ensure_target

    target, results = str(ensure_target(FOLDER, "even", "float32")), []
    for extra in (
        {},
        {"speculative_config": {"method": "ssd", "k": 4, "f": 2, "model": models[1]}},
    ):
        options = {**OPTIONS, "dtype": "float32", "tensor_parallel_size": 2, **extra}
        with engine(target, **options) as llm:
            results.append(texts(llm.generate(PROMPTS, greedy(96), use_tqdm=False)))
    assert results[0] == results[1]


def test_same_tokens_with_and_without(models):
    target, draft = models
    options = {**OPTIONS, "dtype": "float32"}
    with engine(target, **options) as llm:
        plain = texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False))
    speculation = {"method": "ssd", "k": 4, "f": 2, "model": draft}
    with engine(target, speculative_config=speculation, **options) as llm:
        run_dir = own_run_dir()
        found = texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False))
        counted = counters(run_dir)
        print(describe(counted))
        assert found == plain
        assert sum(counted["accepted"][1:]) > sum(counted["accepted"]) // 3

        os.kill(counted["pid"], signal.SIGKILL)
        assert texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False)) == plain, "without a draft"
        wait_for("another draft", lambda: counters(run_dir)["pid"] != counted["pid"], 120)
        before = counters(run_dir)["hits"]
        assert texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False)) == plain, "with another"
        assert counters(run_dir)["hits"] > before
    wait_for("clean end", lambda: not leftovers(run_dir, []), 20)


def test_flashinfer_drafts_for_itself(models):
    """In bf16 a draft that equals its target accepts nearly all (ties between tokens flip)."""
    target, _ = models
    speculation = {"method": "ssd", "k": 4, "f": 2, "model": target, "tree_backend": "flashinfer"}
    # What it accepts is the question here, not how fast.
    speculation |= {"on_miss": "wait", "max_wait_ms": 2000}
    with engine(target, dtype="bfloat16", speculative_config=speculation, **OPTIONS) as llm:
        run_dir = own_run_dir()
        llm.generate(PROMPTS, greedy(128), use_tqdm=False)
        counted = counters(run_dir)
    print(describe(counted))
    assert sum(counted["accepted"][4:]) > 0.9 * sum(counted["accepted"])
