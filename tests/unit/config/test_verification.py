"""Adaptive verification is on wherever vLLM can do it, and nowhere else."""

from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.config.verification import choose_verification


def _chosen(given=None, **changes):
    parts = {
        "use_v2_model_runner": True,
        "lora_config": None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        "attention_config": SimpleNamespace(backend=None),
        "model_config": SimpleNamespace(is_hybrid=False),
        "speculative_config": SSDConfig(enable_adaptive_verification=given),
    }
    config = SimpleNamespace(**{**parts, **changes})
    choose_verification(config)
    return config.speculative_config.enable_adaptive_verification


def _attention(name):
    return {"attention_config": SimpleNamespace(backend=SimpleNamespace(name=name))}


def _graphs(mode):
    return {"compilation_config": SimpleNamespace(cudagraph_mode=mode)}


@pytest.mark.parametrize(
    "change, on",
    [
        ({}, True),
        (_attention("FLASH_ATTN"), True),
        (_attention("TRITON_ATTN"), True),
        (_attention("ROCM_ATTN"), True),
        (_attention("ROCM_AITER_UNIFIED_ATTN"), True),
        (_attention("FLASHINFER"), False),
        (_attention("ROCM_AITER_FA"), False),
        (_graphs(CUDAGraphMode.NONE), False),
        (_graphs(CUDAGraphMode.PIECEWISE), False),
        ({"use_v2_model_runner": False}, False),
        ({"lora_config": object()}, False),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, False),
        ({"model_config": SimpleNamespace(is_hybrid=True)}, False),
        ({"model_config": SimpleNamespace(is_hybrid=False, return_sampling_mask=True)}, False),
    ],
)
def test_on_where_vllm_can_unless_it_is_given(change, on):
    assert _chosen(**change) is on
    for given in (True, False):
        assert _chosen(given, **change) is given
        asked = SSDConfig(enable_adaptive_verification=given).asked_for_adaptive_verification
        assert asked is given
