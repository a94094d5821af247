"""New weights for a draft: how they are kept, and what a trainer is told where they cannot be."""

import os
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from vllm.distributed import parallel_state

from tests.support.gpu_hosts import parallel
from tests.support.sentences import one_sentence
from vllm_ssd.hooks.received_weights import ReceivedWeights, keep_only
from vllm_ssd.hooks.worker import OwnWorker
from vllm_ssd.protocol import SpeculationTable, TableShape, draft_names, messages, rundir
from vllm_ssd.protocol.messages import Reload


def start_draft(worker, _):
    OwnWorker.start_draft_weight_update(worker)


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "table"
    monkeypatch.setattr(rundir, "table_path", lambda _: path)
    return SpeculationTable.create(path, TableShape(1, 2, 2))


@pytest.fixture
def refusal(tmp_path, table, monkeypatch):
    """The sentence for a checkpoint in this folder."""

    def refusal(folder, draft_server=None, call=OwnWorker.reload_draft):
        config = SimpleNamespace(
            start_timeout_s=600.0, draft_server=draft_server, own_draft="own:1", share_draft=True
        )
        monkeypatch.setattr(draft_names, "find", lambda name: (tmp_path / name, None))
        worker = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=config))
        with pytest.raises(ValueError) as error:
            call(worker, str(folder))
        return one_sentence(error)

    return refusal


def test_a_folder_without_a_model(tmp_path, refusal):
    assert f"there is no config.json in {tmp_path / 'none'}" in refusal(tmp_path / "none")


@pytest.mark.parametrize("pid", [0, max(psutil.pids()) + 100_000], ids=["never begun", "lost"])
def test_a_draft_that_is_gone(tmp_path, table, refusal, pid):
    (tmp_path / "config.json").touch()
    table.draft["pid"] = pid
    assert "the draft is lost" in refusal(tmp_path)


@pytest.mark.parametrize("engine, last_stage", [(0, True), (1, True), (0, False)])
def test_a_draft_of_a_group_is_told_once(tmp_path, table, monkeypatch, engine, last_stage):
    """By the first engine's last pipeline stage, at the address of the service."""
    (tmp_path / "config.json").touch()
    table.draft["pid"] = os.getpid()
    asked = []
    monkeypatch.setattr(draft_names, "find", lambda name: (tmp_path / name, None))
    monkeypatch.setattr(messages, "ask", lambda *what: asked.append(what) or "")
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))
    stage = SimpleNamespace(is_last_rank=last_stage)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: stage)
    config = SimpleNamespace(
        start_timeout_s=600.0, draft_server=None, own_draft="dp:1", share_draft=True
    )
    vllm_config = SimpleNamespace(
        speculative_config=config, parallel_config=parallel(1, engine=engine)
    )
    OwnWorker.reload_draft(SimpleNamespace(vllm_config=vllm_config), str(tmp_path))
    told = [(tmp_path / "dp:1", Reload(str(tmp_path)), 600.0)]
    assert asked == (told if engine == 0 and last_stage else [])


def test_a_draft_that_is_not_the_engines_alone(tmp_path, refusal):
    (tmp_path / "config.json").touch()
    assert "shared by all engines of its draft server" in refusal(tmp_path, draft_server="drafts")


def test_a_trainer_is_refused_before_it_sends(tmp_path, table, refusal):
    assert "shared by all engines" in refusal(None, draft_server="drafts", call=start_draft)
    table.draft["pid"] = 0
    assert "the draft is lost" in refusal(None, call=start_draft)


def test_weights_that_were_sent_are_a_checkpoint(tmp_path):
    """The buffers in which they came are used again. Of several, the newest stay."""
    received = ReceivedWeights(keep=True)
    folders = []
    for value in (1.0, 2.0):
        buffer = torch.full((2, 3), value)
        assert received.load_weights([("a", buffer[:, ::2]), ("b", buffer)]) == {"a", "b"}
        buffer.zero_()
        folders.append(received.save(tmp_path, LlamaConfig(vocab_size=7)))
    assert LlamaConfig.from_pretrained(folders[1]).vocab_size == 7
    found = load_file(folders[1] / "model.safetensors")
    assert found["a"].tolist() == [[2.0] * 2] * 2 and found["b"].tolist() == [[2.0] * 3] * 2
    keep_only(folders[1])
    assert list(tmp_path.iterdir()) == [folders[1]]


def test_weights_of_which_nobody_asks_are_not_kept():
    received = ReceivedWeights(keep=False)
    assert received.load_weights([("a", torch.ones(1))]) == {"a"}
    assert not received.state_dict() and not received._tensors
