"""vLLM with the plugin, and arguments for a tiny target with a tiny draft."""

import pytest
from vllm.engine.arg_utils import EngineArgs

from vllm_ssd.plugin import register
from vllm_ssd.table import SpeculationTable, TableShape, rundir


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


@pytest.fixture
def table(tmp_path, monkeypatch):
    """That of an engine, wherever its run directory is."""
    monkeypatch.setattr(rundir, "table_path", lambda _: tmp_path / "table")
    return SpeculationTable.create(tmp_path / "table", TableShape(slots=1, k=2, branches=2))
