"""Which attention the draft gets, and what is said where it cannot have the one asked for."""

import importlib.util

import pytest
import torch
from vllm.config import ModelConfig

from tests.support.gpu_hosts import gpus
from tests.support.sentences import refused
from vllm_ssd.draft.attention.registry import resolve_tree_backends

GPU, AMD = gpus(1), gpus(1, rocm=True)


@pytest.fixture
def draft(models) -> ModelConfig:
    return ModelConfig(models.draft, dtype="bfloat16")


BOTH = {"triton", "flashinfer"}


@pytest.mark.parametrize(
    "installed, dtype, head, auto, problems",
    [
        (BOTH, "bfloat16", 128, ["triton", "flashinfer"], {}),
        (set(), "bfloat16", 128, [], dict.fromkeys(BOTH, "is not installed")),
        (BOTH, "float32", 128, ["triton"], {"flashinfer": "needs a 16-bit draft"}),
        (BOTH, "bfloat16", 32, ["triton"], {"flashinfer": "needs heads of 64, 128 or 256"}),
        (BOTH, "bfloat16", 80, [], {"triton": "needs heads of a power of two"}),
        ({"flashinfer"}, "bfloat16", 128, ["flashinfer"], {"triton": "is not installed"}),
    ],
)
def test_attention_on_gpus(monkeypatch, draft, installed, dtype, head, auto, problems):
    there = installed | {"torch"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in there or None)
    monkeypatch.setattr(draft, "get_head_size", lambda: head)
    draft.dtype = getattr(torch, dtype)
    assert resolve_tree_backends("auto", draft, GPU) == (*auto, "sdpa")
    assert resolve_tree_backends("auto", draft, AMD) == (*sorted(auto), "sdpa")
    for backend in auto:
        assert resolve_tree_backends(backend, draft, GPU) == (backend,)
    for backend, problem in problems.items():
        with refused(problem):
            resolve_tree_backends(backend, draft, GPU)


@pytest.mark.parametrize(
    "installed, right",
    [("0.5.3+amd.1", False), ("0.5.3+amd.2", True), ("0.5.3+amd.3", True), ("0.6.18", True)],
)
def test_a_release_of_flashinfer_whose_masks_are_wrong(monkeypatch, tmp_path, installed, right):
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise ImportError('touches the GPU')\n")
    about = tmp_path / f"amd_flashinfer-{installed}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: amd-flashinfer\nVersion: {installed}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert ("flashinfer" in resolve_tree_backends("auto", None, AMD)) == right
    if right:
        assert resolve_tree_backends("flashinfer", None, AMD) == ("flashinfer",)
    else:
        with refused("needs amd-flashinfer 0.5.3+amd.2 or later and this is 0.5.3+amd.1"):
            resolve_tree_backends("flashinfer", None, AMD)
