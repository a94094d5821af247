"""Prompts in pieces are refused for targets with states, and for no others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.streaming_input import with_pieces_refused


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("speculation", [None, SSDConfig(k=2)])
def test_of_targets_with_states(speculation, with_states):
    async def vllms(engine, request_id: str) -> str:
        return f"{request_id} is added"

    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculation),
        model_config=SimpleNamespace(is_hybrid=with_states, is_attention_free=False),
    )
    added = with_pieces_refused(vllms, engine, request_id="a")
    if speculation and with_states:
        with pytest.raises(ValueError, match="does not support prompts in pieces for targets"):
            asyncio.run(added)
    else:
        assert asyncio.run(added) == "a is added"
