"""What the engines of the GPU tests have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("SSD_TEST_MODELS", Path(__file__).parents[2] / ".models"))
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "gpu_memory_utilization": 0.3,
    # Given, not measured: other engines may come and go on the same GPUs.
    "kv_cache_memory_bytes": 2**30,
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
