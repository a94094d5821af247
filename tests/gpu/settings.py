"""What the engines of the GPU tests have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.support.harness import SSD as ON_ITS_OWN_DEVICE

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
