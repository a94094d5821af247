"""vLLM with the plugin, and arguments for a tiny target with a tiny draft."""

import pytest
from vllm.engine.arg_utils import EngineArgs

from vllm_ssd.plugin import register


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    register()


@pytest.fixture
def engine_args(models):
    def engine_args(options: dict | None, **args) -> EngineArgs:
        plain = {"model": models.target, "dtype": "float32", "enforce_eager": True}
        return EngineArgs(speculative_config=options, **plain | args)

    return engine_args
