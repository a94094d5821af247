"""Streaming input is refused for targets with states, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.streaming_input import with_streaming_refused


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("speculation", [None, SSDConfig(k=2)])
def test_of_targets_with_states(speculation, with_states, resumable):
    def vllms(processor, request_id: str, resumable: bool) -> tuple[str, bool]:
        return request_id, resumable

    processor = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculation),
        model_config=SimpleNamespace(is_hybrid=with_states, is_attention_free=False),
    )
    if speculation and with_states and resumable:
        with pytest.raises(ValueError, match="does not support streaming input for targets"):
            with_streaming_refused(vllms, processor, "a", resumable=True)
    else:
        found = with_streaming_refused(vllms, processor, "a", resumable=resumable)
        assert found == ("a", resumable)
