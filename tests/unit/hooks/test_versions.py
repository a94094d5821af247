"""Where vLLM is not one that the plugin knows, or has a method of this name, it stays as it is."""

import logging
from typing import Literal

import pytest
import vllm
from vllm.config import speculative
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from tests.support.sentences import refused
from vllm_ssd.config.versions import SUPPORTED, SUPPORTED_ON_GPUS
from vllm_ssd.hooks.patches import check_vllm, find_mismatch
from vllm_ssd.plugin import register


@pytest.mark.parametrize(
    "version, on_cpus, on_gpus",
    [
        *((version, True, False) for version in ("0.32.0+cpu", "0.32.1")),
        *(
            (version, True, True)
            for version in ("0.33.0rc2", "0.33.0", "0.33.1rc2.dev7+g12ab", "0.33.9")
        ),
        *((version, False, False) for version in ("0.31.4", "0.34.0rc1", "0.34.0", "1.0", "dev")),
    ],
)
def test_versions(monkeypatch, engine_args, version, on_cpus, on_gpus):
    """GPUs need a vLLM that schedules ahead for ssd."""
    monkeypatch.setattr(vllm, "__version__", version)
    for served, supported in ((on_cpus, SUPPORTED), (on_gpus, f"{SUPPORTED_ON_GPUS} on GPUs")):
        if served:
            check_vllm()
        else:
            said = f"supports vLLM {supported} and this is vLLM {version}"
            with refused(said, kind=RuntimeError):
                engine_args({"method": "ssd"}).create_engine_config()
            engine_args({"method": "ngram", "num_speculative_tokens": 2}).create_engine_config()
        monkeypatch.setattr(current_platform, "is_cpu", lambda: False)


def test_changed_and_missing_names(monkeypatch):
    monkeypatch.setattr(Executor, "__init__", lambda self, vllm_config, extra: None)
    with refused("__init__ takes (self, vllm_config, extra)", kind=RuntimeError):
        check_vllm()
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
    """It may pass other arguments, and its engines without ssd get the config that it makes."""

    def later(self, target, *, parallel):
        return target, parallel

    originals = EngineArgs.create_engine_config, Executor.__init__
    monkeypatch.setattr(EngineArgs, "create_speculative_config", later)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    register()
    assert originals == (EngineArgs.create_engine_config, Executor.__init__)
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
