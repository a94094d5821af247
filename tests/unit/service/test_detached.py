"""Detached processes and those that start them, when one of them ends in the middle."""

import socket
import subprocess
import sys

import pytest

from tests.support.gpu_hosts import engine, parallel
from vllm_ssd.bridge import near, remote_service
from vllm_ssd.bridge.remote_service import RemoteService
from vllm_ssd.service import detached
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.table import TableOwner, TableShape


def test_no_process_is_started_for_settings_that_cannot_be_sent(monkeypatch, tmp_path):
    monkeypatch.delattr(subprocess, "Popen")
    with pytest.raises(TypeError):
        detached.start_detached("no.module", tmp_path, {"model": object()})


def test_paths_for_another_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = detached.absolute_paths({"PYTHONPATH": ":lib:/opt", "HF_HOME": "hf", "OTHER": "a"})
    assert found == {"PYTHONPATH": f"{tmp_path}/lib:/opt", "HF_HOME": f"{tmp_path}/hf"}


@pytest.mark.parametrize("half", [b"", b'{"path": "/mo'])
def test_a_process_whose_parent_ends_before_it_has_sent_all(half):
    ours, theirs = socket.socketpair()
    program = "from vllm_ssd.service.detached import detach; detach(dict)"
    with theirs:
        begun = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
    with ours:
        ours.sendall(half)
    said = "SSD: the process that started this one was killed before it had said what to do\n"
    assert begun.communicate()[1] == said


def test_a_process_that_is_killed_before_it_has_read_its_settings():
    """The channel is then not closed but reset."""
    ours, theirs = socket.socketpair()
    ours.sendall(b"settings")
    theirs.close()
    assert list(detached.words(ours)) == []


@pytest.mark.parametrize("half", ["", '{"ready": "127.0'])
def test_a_bridge_that_ends_in_the_middle_of_a_word(half, monkeypatch, tmp_path):
    (tmp_path / "bridge.py").write_text(
        "import socket, sys\n"
        "from vllm_ssd.service.detached import detach\n"
        f"detach(dict)[0].sendall({half.encode()!r})\n"
    )
    monkeypatch.setattr(remote_service, "BRIDGE", "bridge")
    config = engine(parallel(1), draft_server="drafts")
    config.speculative_config.ray_address = "auto"
    with pytest.raises(ValueError, match="its bridge ended at its start, and the log above says"):
        RemoteService(config).drafts(tmp_path)


def test_a_bridge_that_fails_lets_another_one_start_at_once(monkeypatch):
    """It then waits a while for the end of its engine, which may have been killed."""
    own, (ours, theirs), said = OwnFiles(TableShape(1, 2, 3), TableOwner()), socket.socketpair(), []
    spec = near.NearSpec(str(own.run_dir), "drafts", "m", "auto", TableShape(1, 2, 3))
    monkeypatch.setattr(near, "detach", lambda _: (theirs, spec))
    monkeypatch.setattr(near, "connect", lambda _: None)
    monkeypatch.setattr(near.signal, "signal", lambda *_: None)
    monkeypatch.setattr(near, "find_sites", None)  # with which it fails
    monkeypatch.setattr(near, "_put_away", lambda _: said.extend(detached.words(ours)))
    ours.settimeout(10.0)
    near.main()
    own.remove()
    assert [kind for kind, _ in said] == ["ready"]
