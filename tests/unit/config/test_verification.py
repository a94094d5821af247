"""Adaptive verification is on wherever vLLM can do it, and nowhere else."""

from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.config.verification import choose_verification


def _config(given=None, **changes):
    parts = {
        "use_v2_model_runner": True,
        "lora_config": None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        "attention_config": SimpleNamespace(backend=None),
        "model_config": SimpleNamespace(is_hybrid=False),
        "speculative_config": SSDConfig(enable_adaptive_verification=given),
    }
    return SimpleNamespace(**{**parts, **changes})


def _chosen(*args, **changes):
    config = _config(*args, **changes)
    choose_verification(config)
    return config.speculative_config.enable_adaptive_verification


def _attention(name):
    return SimpleNamespace(backend=SimpleNamespace(name=name))


@pytest.mark.parametrize(
    "backend", ["FLASH_ATTN", "TRITON_ATTN", "ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN"]
)
def test_on_where_vllm_can(backend):
    assert _chosen() is True
    assert _chosen(attention_config=_attention(backend)) is True


@pytest.mark.parametrize(
    "change",
    [
        {"use_v2_model_runner": False},
        {"lora_config": object()},
        {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
        {"compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE)},
        {"compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE)},
        {"attention_config": _attention("FLASHINFER")},
        {"attention_config": _attention("ROCM_AITER_FA")},
        {"model_config": SimpleNamespace(is_hybrid=True)},
        {"model_config": SimpleNamespace(is_hybrid=False, return_sampling_mask=True)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_off_where_vllm_would_refuse(change):
    assert _chosen(**change) is False


@pytest.mark.parametrize("given", [True, False])
def test_what_is_given_stays(given):
    assert _chosen(given) is given
    assert SSDConfig(enable_adaptive_verification=given).asked_for_adaptive_verification is given
