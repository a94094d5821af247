"""A GPU that is full or taken: one sentence that names it, whoever says so in whatever words."""

from unittest.mock import MagicMock

import pytest
import torch

from vllm_ssd.service.errors import clear_words
from vllm_ssd.service.own_ray import sentence

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 108.00 MiB. GPU 0 has a total"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    MemoryError("no room for a block of the draft's KV cache"),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The third, of which a quarter is left."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**32))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**29)


def said(error: Exception, chosen_kv_cache: bool = False) -> str:
    with pytest.raises((MemoryError, RuntimeError)) as found, clear_words(chosen_kv_cache):
        raise error
    return sentence(found.value)


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_full(error):
    assert said(error) == (
        "MemoryError: the draft's GPU (CUDA_VISIBLE_DEVICES=3) has too little free memory (1.00 of "
        "4.0 GiB are free when the draft has taken 0.50 GiB and needs more): end what else runs "
        "there or name another GPU with draft_device in --speculative-config, or --device of "
        "'vllm-ssd draft'"
    )
    assert "there, lower draft_kv_cache_gib or name another" in said(error, chosen_kv_cache=True)


def test_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", MagicMock(side_effect=FULL[1]))
    assert "free memory (not enough to begin to use it): end what" in said(FULL[1])
    error = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    assert "(CUDA_VISIBLE_DEVICES=3) is in use by a process that has it for itself" in said(error)
    # Other errors stay as they are.
    assert said(RuntimeError("CUDA error: invalid argument")).endswith("invalid argument")
