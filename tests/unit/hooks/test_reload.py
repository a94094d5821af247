"""New weights for a draft: what a trainer is told where it cannot have them."""

import os
from types import SimpleNamespace

import psutil
import pytest
from vllm.distributed import parallel_state

from tests.support.gpu_hosts import parallel
from tests.support.sentences import one_sentence
from vllm_ssd.hooks.worker import OwnWorker
from vllm_ssd.protocol import SpeculationTable, TableShape, draft_names, messages, rundir
from vllm_ssd.protocol.messages import Reload


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "table"
    monkeypatch.setattr(rundir, "table_path", lambda _: path)
    return SpeculationTable.create(path, TableShape(1, 2, 2))


@pytest.fixture
def refusal(tmp_path, table, monkeypatch):
    """The sentence for a checkpoint in this folder."""

    def refusal(folder, draft_server=None):
        config = SimpleNamespace(
            start_timeout_s=600.0, draft_server=draft_server, own_draft="own:1", share_draft=True
        )
        monkeypatch.setattr(draft_names, "find", lambda name: (tmp_path / name, None))
        worker = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=config))
        with pytest.raises(ValueError) as error:
            OwnWorker.reload_draft(worker, str(folder))
        return one_sentence(error)

    return refusal


def test_a_folder_without_a_model(tmp_path, refusal):
    assert f"there is no config.json in {tmp_path / 'none'}" in refusal(tmp_path / "none")


@pytest.mark.parametrize("pid", [0, max(psutil.pids()) + 100_000], ids=["never begun", "lost"])
def test_a_draft_that_is_gone(tmp_path, table, refusal, pid):
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
        start_timeout_s=600.0, draft_server=None, own_draft="dp:1", share_draft=True
    )
    vllm_config = SimpleNamespace(
        speculative_config=config, parallel_config=parallel(1, engine=engine)
    )
    OwnWorker.reload_draft(SimpleNamespace(vllm_config=vllm_config), str(tmp_path))
    told = [(tmp_path / "dp:1", Reload(str(tmp_path)), 600.0)]
    assert asked == (told if engine == 0 else [])


def test_a_draft_that_is_not_the_engines_alone(tmp_path, refusal):
    (tmp_path / "config.json").touch()
    assert "shared by all engines of its draft server" in refusal(tmp_path, draft_server="drafts")


def test_tensors_are_refused():
    with pytest.raises(ValueError) as error:
        OwnWorker.start_draft_weight_update(SimpleNamespace())
    assert "write a checkpoint to a folder" in one_sentence(error)
