"""New weights for a draft that cannot take them: what the trainer is told, at once."""

import os
from types import SimpleNamespace

import psutil
import pytest
from vllm.distributed import parallel_state

from tests.support.gpu_hosts import parallel
from tests.support.sentences import one_sentence
from vllm_ssd.hooks.reload import reload_draft
from vllm_ssd.service import draft_names, messages, rundir
from vllm_ssd.service.messages import Reload
from vllm_ssd.table import SpeculationTable, TableShape


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "table"
    monkeypatch.setattr(rundir, "table_path", lambda _: path)
    return SpeculationTable.create(path, TableShape(1, 2, 2))


@pytest.fixture
def refusal(tmp_path, table):
    """The sentence for a checkpoint in this folder."""

    def refusal(folder, draft_server=None):
        config = SimpleNamespace(
            run_dir=str(tmp_path), start_timeout_s=600.0, draft_server=draft_server, group=""
        )
        worker = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=config))
        with pytest.raises(ValueError) as error:
            reload_draft(worker, str(folder))
        return one_sentence(error)

    return refusal


def test_a_folder_without_a_model(tmp_path, refusal):
    assert f"there is no config.json in {tmp_path / 'none'}" in refusal(tmp_path / "none")


@pytest.mark.parametrize("pid", [0, max(psutil.pids()) + 100_000])
def test_a_draft_that_is_gone(tmp_path, table, refusal, pid):
    """Never begun, or lost."""
    (tmp_path / "config.json").touch()
    table.draft["pid"] = pid
    assert "the draft is lost" in refusal(tmp_path)


@pytest.mark.parametrize("engine", [0, 1])
def test_a_draft_of_a_group_is_told_once(tmp_path, table, monkeypatch, engine):
    """By the first engine, at the address of the service."""
    (tmp_path / "config.json").touch()
    table.draft["pid"] = os.getpid()
    asked = []
    monkeypatch.setattr(draft_names, "find", lambda name: (tmp_path / name, None))
    monkeypatch.setattr(messages, "ask", lambda *what: asked.append(what) or "")
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))
    config = SimpleNamespace(
        run_dir="elsewhere", start_timeout_s=600.0, draft_server=None, group="dp:1"
    )
    vllm_config = SimpleNamespace(
        speculative_config=config, parallel_config=parallel(1, engine=engine)
    )
    reload_draft(SimpleNamespace(vllm_config=vllm_config), str(tmp_path))
    told = [(tmp_path / "dp:1", Reload(str(tmp_path)), 600.0)]
    assert asked == (told if engine == 0 else [])


def test_a_draft_that_is_not_the_engines_alone(tmp_path, refusal):
    (tmp_path / "config.json").touch()
    assert "shared by all engines of its draft server" in refusal(tmp_path, draft_server="drafts")
