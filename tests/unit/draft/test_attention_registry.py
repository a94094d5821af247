"""Which attention the draft gets, and what is said where it cannot have the one asked for."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ModelConfig

from tests.support.model_folders import write_model
from tests.support.sentences import one_sentence
from vllm_ssd.draft.attention.base import PagedAttention
from vllm_ssd.draft.attention.registry import (
    BACKENDS,
    TREE_BACKEND_VARIABLE,
    default_tree_backend,
    load_backend,
    resolve_tree_backend,
)

CPU, GPU = SimpleNamespace(is_cpu=lambda: True), SimpleNamespace(is_cpu=lambda: False)


@pytest.fixture
def draft(tmp_path) -> ModelConfig:
    return ModelConfig(write_model(tmp_path), dtype="bfloat16")


def refusal(backend, draft, platform) -> str:
    with pytest.raises(ValueError) as error:
        resolve_tree_backend(backend, draft, platform)
    return one_sentence(error)


def test_the_environment(monkeypatch):
    monkeypatch.delenv(TREE_BACKEND_VARIABLE, raising=False)
    assert default_tree_backend() == "auto"
    monkeypatch.setenv(TREE_BACKEND_VARIABLE, "sdpa")
    assert default_tree_backend() == "sdpa"
    monkeypatch.setenv(TREE_BACKEND_VARIABLE, "eager")
    with pytest.raises(ValueError) as error:
        default_tree_backend()
    assert f"{TREE_BACKEND_VARIABLE} must be one of auto, triton, flashinfer, sdpa" in one_sentence(
        error
    )


@pytest.mark.parametrize("known", [True, False])
def test_attention_on_cpus(draft, known):
    of = draft if known else None
    assert resolve_tree_backend("auto", of, CPU) == "sdpa"
    for backend in ("flashinfer", "triton"):
        assert "needs a GPU: write 'auto' or 'sdpa'" in refusal(backend, of, CPU)


BOTH = {"triton", "flashinfer"}


@pytest.mark.parametrize(
    "installed, dtype, head, auto, problems",
    [
        (set(), "bfloat16", 128, "sdpa", dict.fromkeys(BOTH, "is not installed")),
        (BOTH, "float32", 128, "triton", {"flashinfer": "needs a 16-bit draft"}),
        (BOTH, "bfloat16", 32, "triton", {"flashinfer": "needs heads of 64, 128 or 256"}),
        (BOTH, "bfloat16", 80, "sdpa", {"triton": "needs heads of a power of two"}),
        ({"flashinfer"}, "bfloat16", 128, "flashinfer", {"triton": "is not installed"}),
    ],
)
def test_attention_on_gpus(monkeypatch, draft, installed, dtype, head, auto, problems):
    there = installed | {"torch"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in there or None)
    monkeypatch.setattr(draft, "get_head_size", lambda: head)
    draft.dtype = getattr(torch, dtype)
    assert resolve_tree_backend("auto", draft, GPU) == auto
    for backend, problem in problems.items():
        assert problem in refusal(backend, draft, GPU)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_its_class(backend):
    if importlib.util.find_spec(BACKENDS[backend].package) is None:
        pytest.skip(f"{BACKENDS[backend].package} is not installed")
    assert issubclass(load_backend(backend), PagedAttention)
