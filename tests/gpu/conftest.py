"""Several engines in one test process, and the models of most."""

import os

import pytest

from tests.gpu.settings import FOLDER, GPUS

if GPUS:
    # Some tests compute on the GPU themselves, after which CUDA does not survive a fork.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
# vLLM's attention for float32 is Triton's, which rounds to tf32 unless it is told not to: errors of
# 1e-3, and texts that part where two tokens are nearly alike.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def pytest_pycollect_makemodule() -> None:
    """Skip all files where there is no GPU, before they are imported."""
    if not GPUS:
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def models() -> tuple[str, str]:
    """(SmolLM2-135M-Instruct, the same without layer 14)."""
    from benchmarks.standin import ensure_draft, ensure_smollm2

    return str(ensure_smollm2(FOLDER)), str(ensure_draft(FOLDER))
