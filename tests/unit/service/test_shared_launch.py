"""A draft service's files, which its keeper holds for others when the launcher has left."""

import os
import select

import pytest

from tests.support.gpu_hosts import engine, gpus, parallel
from vllm_ssd.service import launch, rundir
from vllm_ssd.service.draft_device import DraftDevice
from vllm_ssd.service.draft_names import DraftName, find
from vllm_ssd.service.shared_launch import SharedDraftLauncher
from vllm_ssd.table import SpeculationTable


@pytest.fixture
def held(monkeypatch):
    """What a keeper that does nothing holds: its end of the channel, and the locks."""
    from vllm import platforms

    held: list[int] = []

    def start(command, pass_fds, **_):
        held.extend(map(os.dup, pass_fds))
        os.write(held[0], b'{"ready": "here"}\n')

    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    monkeypatch.setattr(launch.subprocess, "run", start)
    monkeypatch.setattr(launch, "make_keeper_spec", lambda *_: "nothing")
    monkeypatch.setattr(launch, "STOP_S", 0.1)
    yield held
    for fd in held:
        os.close(fd)


def test_what_it_leaves_is_still_there(held):
    made = SharedDraftLauncher(engine(parallel(1)), DraftName("dp:1", {}), DraftDevice())
    made.start()
    made.wait_ready()
    run_dir, _ = find("dp:1")
    owner = SpeculationTable.open(rundir.table_path(run_dir), writable=False).owner
    assert (owner.model, owner.draft_server, owner.pid) == ("", "dp:1", os.getpid())
    assert not select.select(held[:1], [], [], 0)[0]
    made.leave()
    made.stop()
    assert select.select(held[:1], [], [], 0)[0], "the keeper sees that it is gone"
    assert find("dp:1")[0] == run_dir and rundir.table_path(run_dir) in rundir.tables()
    for fd in held[1:]:
        os.close(fd)
    del held[1:]
    assert not rundir.is_alive(run_dir) and rundir.table_path(run_dir) not in rundir.tables()
    rundir.remove(run_dir)


def test_what_it_stops_is_gone(held):
    made = SharedDraftLauncher(engine(parallel(1)), DraftName("dp:1", {}), DraftDevice())
    made.start()
    run_dir, _ = find("dp:1")
    made.begin_stop()
    while held:
        os.close(held.pop())  # as the keeper ends
    made.stop()
    assert not run_dir.exists() and not rundir.table_path(run_dir).exists()
