"""New weights for a draft: what a trainer is told where it cannot have them."""

import os
from types import SimpleNamespace

import psutil
import pytest
from vllm.distributed import parallel_state

from tests.support.gpu_hosts import parallel
from tests.support.sentences import refused
from vllm_ssd.hooks.worker import OwnWorker
from vllm_ssd.table import draft_names, messages
from vllm_ssd.table.messages import Reload


@pytest.fixture
def reload(tmp_path, table, monkeypatch):
    """Asks for the weights of this folder, as an engine of a group that shares a draft; returns
    what the draft service was asked."""
    (tmp_path / "config.json").touch()
    asked = []
    monkeypatch.setattr(draft_names, "find_all", lambda name: [(tmp_path / name, None)])
    monkeypatch.setattr(messages, "ask", lambda *what: asked.append(what) or "")
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))

    def reload(folder, draft_server=None, pid=None, engine=0, last_stage=True):
        stage = SimpleNamespace(is_last_rank=last_stage)
        monkeypatch.setattr(parallel_state, "get_pp_group", lambda: stage)
        table.draft["pid"] = os.getpid() if pid is None else pid
        config = SimpleNamespace(
            start_timeout_s=600.0, draft_server=draft_server, own_draft="dp:1", share_draft=True
        )
        vllm_config = SimpleNamespace(
            speculative_config=config, parallel_config=parallel(1, engine=engine)
        )
        OwnWorker.reload_draft(SimpleNamespace(vllm_config=vllm_config), str(folder))
        return asked

    return reload


@pytest.mark.parametrize(
    "folder, given, said",
    [
        ("none", {}, "there is no config.json in "),
        (".", {"pid": 0}, "the draft is lost"),  # never begun
        (".", {"pid": max(psutil.pids()) + 100_000}, "the draft is lost"),
        (".", {"draft_server": "drafts"}, "shared by all engines of its draft server"),
    ],
)
def test_refused(tmp_path, reload, folder, given, said):
    with refused(said):
        reload(tmp_path / folder, **given)


def test_a_draft_of_a_group_is_told_once(tmp_path, reload):
    """By the first engine's last pipeline stage, at the address of the service."""
    assert reload(tmp_path, engine=1) == [] == reload(tmp_path, last_stage=False)
    assert reload(tmp_path, engine=0) == [(tmp_path / "dp:1", Reload(str(tmp_path)), 600.0)]


def test_tensors_are_refused():
    with refused("write a checkpoint to a folder"):
        OwnWorker.start_draft_weight_update(SimpleNamespace())
