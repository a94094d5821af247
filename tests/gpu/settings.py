"""What the engines of the GPU tests have in common."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.running import counters
from tests.support.harness import SSD as ON_ITS_OWN_DEVICE
from tests.support.harness import engine, greedy, own_run_dir, texts
from vllm_ssd.metrics import describe

FOLDER = Path(os.environ.get("SSD_TEST_MODELS", Path(__file__).parents[2] / ".models"))
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "gpu_memory_utilization": 0.3,
    # Given, not measured: other engines may come and go on the same GPUs.
    "kv_cache_memory_bytes": 2**30,
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
GPUS = torch.cuda.device_count()
# With one GPU the draft shares the target's. They take turns on it, of milliseconds each.
_SHARED = {"draft_device": 0, "max_wait_ms": 2000, "draft_kv_cache_gib": 2}
SSD: dict[str, Any] = {**ON_ITS_OWN_DEVICE, **(_SHARED if GPUS == 1 else {})}


def check_same_texts(
    model: str,
    speculation: dict[str, Any],
    batches: Sequence[Sequence[str]],
    tokens: int,
    **options: Any,
) -> dict[str, Any]:
    """With drafts and without, an engine says the same to all prompts. Returns what was counted."""
    found = []
    for extra in ({}, {"speculative_config": speculation}):
        with engine(model, **{**OPTIONS, **options, **extra}) as llm:
            outputs = [llm.generate(each, greedy(tokens), use_tqdm=False) for each in batches]
            counted = counters(own_run_dir()) if extra else {}
        found.append([texts(each) for each in outputs])
    print(describe(counted), counted)
    assert found[0] == found[1]
    return counted
