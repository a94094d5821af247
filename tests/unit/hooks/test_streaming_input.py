"""Streaming input is refused for targets with states, and nothing else is."""

from types import SimpleNamespace

import pytest

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.streaming_input import with_streaming_refused

OF_STATES = [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("is_hybrid, is_attention_free", OF_STATES)
@pytest.mark.parametrize("speculation", [None, SimpleNamespace(method="ngram"), SSDConfig(k=2)])
def test_of_targets_with_states(speculation, is_hybrid, is_attention_free, resumable):
    def vllms(processor, request_id: str, resumable: bool) -> tuple[str, bool]:
        return request_id, resumable

    processor = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculation),
        model_config=SimpleNamespace(is_hybrid=is_hybrid, is_attention_free=is_attention_free),
    )
    if isinstance(speculation, SSDConfig) and (is_hybrid or is_attention_free) and resumable:
        with pytest.raises(ValueError, match="does not support streaming input for targets"):
            with_streaming_refused(vllms, processor, "a", resumable=True)
    else:
        found = with_streaming_refused(vllms, processor, "a", resumable=resumable)
        assert found == ("a", resumable)
