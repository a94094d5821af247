"""Which attention the draft gets, and what is said where it cannot have the one asked for."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tests.sentences import one_sentence


def test_the_environment(make, monkeypatch):
    monkeypatch.setenv("SSD_TREE_DECODE_BACKEND", "sdpa")
    assert make().tree_backend == "sdpa"
    assert make(tree_backend="auto").tree_backend == "auto"


def test_a_bad_environment(refusal, monkeypatch):
    monkeypatch.setenv("SSD_TREE_DECODE_BACKEND", "eager")
    said = refusal()
    assert (
        "SSD_TREE_DECODE_BACKEND must be one of auto, triton, flashinfer, sdpa, not 'eager'" in said
    )
    monkeypatch.setenv("SSD_TREE_DECODE_BACKEND", "flashinfer")
    assert "flashinfer" in refusal()


def test_attention_on_gpus(refusal, make, monkeypatch):
    for backend in ("flashinfer", "triton"):
        assert "needs a GPU: write 'auto' or 'sdpa'" in refusal(tree_backend=backend)
    gpu, config = SimpleNamespace(is_cpu=lambda: False), make(draft_dtype="bfloat16")
    both = {"triton", "flashinfer"}
    for installed, dtype, head, auto, problems in (
        (set(), "bfloat16", 128, "sdpa", dict.fromkeys(both, "is not installed")),
        (both, "float32", 128, "triton", {"flashinfer": "needs a 16-bit draft"}),
        (both, "bfloat16", 32, "triton", {"flashinfer": "needs heads of 64, 128 or 256"}),
        (both, "bfloat16", 80, "sdpa", {"triton": "needs heads of a power of two"}),
        ({"flashinfer"}, "bfloat16", 128, "flashinfer", {"triton": "is not installed"}),
    ):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, there=installed: name in there or None
        )
        monkeypatch.setattr(config.draft_model_config, "get_head_size", lambda size=head: size)
        config.draft_model_config.dtype = getattr(torch, dtype)
        config.tree_backend = "auto"
        assert config.resolve_tree_backend(gpu) == auto
        for backend, problem in problems.items():
            config.tree_backend = backend
            with pytest.raises(ValueError, match=problem) as error:
                config.resolve_tree_backend(gpu)
            one_sentence(error)
