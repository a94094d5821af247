"""Several engines in one test process, and the models of most."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

from tests.gpu.settings import FOLDER, GPUS

# Some tests compute on the GPU themselves, after which CUDA does not survive a fork.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
# vLLM's attention for float32 is Triton's, which rounds to tf32 unless it is told not to: errors of
# 1e-3, and texts that part where two tokens are nearly alike.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


class NeedsGPU(pytest.Module):
    """A file that is skipped before it is imported."""

    def collect(self) -> NoReturn:
        pytest.skip("needs a GPU")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return None if GPUS else NeedsGPU.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def models() -> tuple[str, str]:
    """(SmolLM2-135M-Instruct, the same without layer 14)."""
    from benchmarks.standin import ensure_draft, ensure_smollm2

    return str(ensure_smollm2(FOLDER)), str(ensure_draft(FOLDER))
