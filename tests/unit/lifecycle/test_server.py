"""The draft server's loop, around an engine that does nothing."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.loaded_draft import tiny_spec
from vllm_ssd.lifecycle import server
from vllm_ssd.lifecycle.server import DraftServer
from vllm_ssd.protocol import RELOADING, rundir
from vllm_ssd.protocol.messages import Reload
from vllm_ssd.protocol.sockets import Sockets, by_type


class Left(Exception):
    """The server has ended its process."""


@pytest.fixture
def make(monkeypatch):
    """A server of this run directory whose loop ends after a step."""
    made: list[DraftServer] = []

    def leave(status: int) -> None:
        raise Left

    def make(run_dir: Path) -> DraftServer:
        one = DraftServer(tiny_spec(run_dir, "sdpa", run_dir))
        made.append(one)

        def step() -> bool:
            one._stopped = True
            return True

        served = SimpleNamespace(ask_for_unknown=lambda: None, beat=lambda: None)
        engine = SimpleNamespace(step=step, tables=[served], requests=[])
        one._draft = SimpleNamespace(engine=engine, served=served)
        one._status = {}
        one._control = Sockets()
        one._control.serve(run_dir, by_type({}))
        return one

    monkeypatch.setattr(server.os, "_exit", leave)
    yield make
    for one in made:
        one._control.close()


def test_it_leaves_when_the_engine_is_gone_not_when_a_file_is(make):
    run_dir, locks = rundir.create()
    stays, leaves = make(run_dir), make(run_dir)
    (run_dir / "lock").unlink()
    os.utime(run_dir, (0, 0))
    stays._loop()
    assert run_dir.stat().st_mtime > 0, "a cleaner would find it old"
    for lock in locks:
        os.close(lock)
    with pytest.raises(Left):
        leaves._loop()
    assert not run_dir.exists()


def test_one_that_takes_other_weights_says_so(make):
    """It is not asleep: the keeper and its engines miss it if it does not come back."""
    run_dir, locks = rundir.create()
    one = make(run_dir)
    seen = []
    one._draft.take_weights = lambda path: seen.append((path, dict(one._status)))
    assert one._reload(Reload("folder")) == ""
    assert seen == [("folder", {"away": RELOADING, "heartbeat": 0})]
    for lock in locks:
        os.close(lock)
    rundir.remove(run_dir)
