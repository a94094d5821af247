"""Where vLLM is not one that the plugin knows, or has a method of this name, it stays as it is."""

import logging
from typing import Literal

import pytest
import vllm
from vllm.config import speculative
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from tests.support.sentences import one_sentence
from vllm_ssd.config.versions import SUPPORTED
from vllm_ssd.hooks.patches import check_vllm, find_mismatch
from vllm_ssd.plugin import register


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.32.1", "0.33.0rc2.dev7+g12ab", "0.33.9"])
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    check_vllm()


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0rc1", "0.34.0", "1.0", "dev"])
def test_unsupported_versions(monkeypatch, engine_args, version):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError) as error:
        engine_args({"method": "ssd"}).create_engine_config()
    assert f"supports vLLM {SUPPORTED} and this is vLLM {version}" in one_sentence(error)
    engine_args({"method": "ngram", "num_speculative_tokens": 2}).create_engine_config()


@pytest.mark.parametrize("version, served", [("0.32.1", False), ("0.33.0", True)])
def test_gpus_need_a_vllm_that_schedules_ahead_for_ssd(monkeypatch, version, served):
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    if served:
        check_vllm()
        return
    with pytest.raises(RuntimeError) as error:
        check_vllm()
    assert "supports vLLM >=0.33,<0.34 on GPUs and this is vLLM 0.32.1" in one_sentence(error)


def test_changed_and_missing_names(monkeypatch):
    monkeypatch.setattr(Executor, "__init__", lambda self, vllm_config, extra: None)
    with pytest.raises(RuntimeError, match=r"__init__ takes \(self, vllm_config, extra\)") as error:
        check_vllm()
    one_sentence(error)
    monkeypatch.undo()
    monkeypatch.delattr(EngineArgs, "create_engine_config")
    assert "EngineArgs.create_engine_config is missing" in (find_mismatch() or "")


@pytest.fixture
def unpatched(monkeypatch):
    """vLLM as it is without the plugin."""
    for owner, name in (
        (EngineArgs, "create_speculative_config"),
        (EngineArgs, "create_engine_config"),
        (Executor, "__init__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


def test_an_unsupported_vllm_is_left_alone(unpatched, monkeypatch, engine_args):
    originals = EngineArgs.create_engine_config, Executor.__init__
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    register()
    assert originals == (EngineArgs.create_engine_config, Executor.__init__)
    with pytest.raises(RuntimeError, match="supports vLLM"):
        engine_args({"method": "ssd"}).create_engine_config()


def test_an_unsupported_vllm_may_pass_other_arguments(unpatched, monkeypatch, engine_args):
    """Its engines without ssd get the config that it makes of them."""

    def later(self, target, *, parallel):
        return target, parallel

    monkeypatch.setattr(EngineArgs, "create_speculative_config", later)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    register()
    assert engine_args(None).create_speculative_config("a", parallel="b") == ("a", "b")
    with pytest.raises(RuntimeError, match="supports vLLM"):
        engine_args({"method": "ssd"}).create_speculative_config("a", parallel="b")


def test_steps_aside_for_vllms_own_ssd(unpatched, monkeypatch, caplog):
    originals = EngineArgs.create_speculative_config, Executor.__init__
    monkeypatch.setattr(speculative, "SpeculativeMethod", Literal["ngram", "ssd"])
    with caplog.at_level(logging.WARNING):
        register()
    assert originals == (EngineArgs.create_speculative_config, Executor.__init__)
    assert "of its own" in caplog.text
