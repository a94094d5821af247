"""vLLM with the plugin, and arguments for a tiny target with a tiny draft."""

from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.model_folders import write_model
from vllm_ssd.plugin import register


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    register()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> SimpleNamespace:
    return SimpleNamespace(
        target=write_model(tmp_path_factory.mktemp("target"), layers=2),
        draft=write_model(tmp_path_factory.mktemp("draft")),
    )


@pytest.fixture
def engine_args(models):
    def engine_args(options: dict | None, **args) -> EngineArgs:
        plain = {"model": models.target, "dtype": "float32", "enforce_eager": True}
        return EngineArgs(speculative_config=options, **plain | args)

    return engine_args
