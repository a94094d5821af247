"""What the keeper does with what becomes of a draft server, without Ray."""

import fcntl
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.loaded_draft import tiny_spec
from vllm_ssd.lifecycle import keeper
from vllm_ssd.lifecycle.actor import DraftLost, RayLost
from vllm_ssd.lifecycle.keeper import Keeper
from vllm_ssd.lifecycle.own_ray import OTHER_RAY, UsersRay
from vllm_ssd.protocol import rundir


class Script:
    """An actor to which this happens, one thing a look; then ``end`` is called."""

    def __init__(self, end: Callable[[], None], *happens: str | DraftLost | None):
        self._end = end
        self._happens = list(happens)
        self.gave_up = False

    def start(self, again: bool) -> None:
        pass

    serve = kill = close = take_over = lambda self: None

    def result(self) -> str | None:
        if not self._happens:
            self._end()
            return None
        event = self._happens.pop(0)
        if isinstance(event, DraftLost):
            raise event
        return event

    def gone(self) -> bool:
        if not self._happens:
            self._end()
        return True

    def give_up(self) -> None:
        self.gave_up = True


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """What the engine core was told of an actor of this script, and whether it was given up."""

    def run(*happens, max_restarts=3, start_timeout_s=60.0, name=""):
        ours, theirs = socket.socketpair()
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        limits = {"start_timeout_s": start_timeout_s, "max_restarts": max_restarts, "name": name}
        spec = replace(tiny_spec(tmp_path, "sdpa", run_dir), **limits)
        actor = Script(lambda: ours.shutdown(socket.SHUT_WR), *happens)
        monkeypatch.setattr(keeper, "DraftActor", lambda *_: actor)
        with ours, theirs:
            Keeper(spec, theirs, UsersRay()).run()
            theirs.close()
            lines = [json.loads(line) for line in ours.makefile("rb")]
        assert not run_dir.exists()
        return [line for line in lines if "awaited" not in line], actor.gave_up

    return run


LATE = "the draft model was not ready within 0 s (start_timeout_s)"


@pytest.mark.parametrize(
    "happens, options, told",
    [
        (
            [None, "one", None, DraftLost("dead"), DraftLost("no memory"), "two"],
            {},
            [{"ready": "one"}, {"lost": "dead"}, {"not_back": "no memory"}, {"back": "two"}],
        ),
        (
            ["one", DraftLost("dead"), DraftLost("still")],
            {"max_restarts": 1},
            [{"ready": "one"}, {"lost": "dead"}, {"given_up": "still"}],
        ),
        (
            ["one", DraftLost("dead")],
            {"max_restarts": 0},
            [{"ready": "one"}, {"given_up": "dead"}],
        ),
        # A Ray that does not come up is started again at the first start, too.
        ([RayLost("port in use"), "one"], {}, [{"ready": "one"}]),
        ([RayLost("no disk")] * 2, {"max_restarts": 1}, [{"failed": "no disk"}]),
        ([DraftLost("no such file")], {}, [{"failed": "no such file"}]),
        # The first start has no deadline here, and later ones have.
        (
            [None, "one", DraftLost("dead"), None],
            {"start_timeout_s": 0, "max_restarts": 1},
            [{"ready": "one"}, {"lost": "dead"}, {"given_up": LATE}],
        ),
    ],
)
def test_what_becomes_of_a_draft(keep, happens, options, told):
    said, gave_up = keep(*happens, **options)
    assert said == told
    assert gave_up == bool({"failed", "given_up"} & {*told[-1]})


def test_a_process_that_does_not_end(keep, monkeypatch):
    """What is lost is said first, and then that it stays."""
    looks = iter([False, False, True])
    monkeypatch.setattr(keeper, "SAY_AGAIN_S", 0.0)
    monkeypatch.setattr(Script, "gone", lambda self: next(looks))
    said, _ = keep("one", DraftLost("no sign of life"), "two")
    kinds = [kind for line in said for kind in line]
    assert kinds == ["ready", "lost", "stays", "stays", "back"]


def test_a_parent_with_many_open_files(keep, monkeypatch):
    pair, files = socket.socketpair, resource.RLIMIT_NOFILE
    former = resource.getrlimit(files)
    resource.setrlimit(files, (former[1], former[1]))

    def high_pair():
        ours, theirs = pair()
        with theirs:
            return ours, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, 1024))

    monkeypatch.setattr(socket, "socketpair", high_pair)
    try:
        assert keep("one")[0] == [{"ready": "one"}]
    finally:
        resource.setrlimit(files, former)


@pytest.mark.parametrize("owner", [True, False])
def test_sigterm_leaves_the_files_to_an_engine_that_goes_on(tmp_path, monkeypatch, owner):
    """It starts another keeper on them."""
    ours, theirs = socket.socketpair()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    actor = Script(lambda: (owner or ours.close(), sys.exit(0)), "one")
    monkeypatch.setattr(keeper, "DraftActor", lambda *_: actor)
    with ours, theirs, pytest.raises(SystemExit):
        Keeper(tiny_spec(tmp_path, "sdpa", run_dir), theirs, UsersRay()).run()
    assert run_dir.exists() == owner


def test_a_draft_of_a_group_stays_for_those_that_are_left(keep, monkeypatch):
    """The first engine is gone from the third look on, and the last one some time later."""
    others = [["two", "three"], ["three"], ["three"], []]
    asked = []

    def engines_of(name):
        asked.append(name)
        return others.pop(0)

    killed, locks = rundir.create()
    while locks:
        os.close(locks.pop())
    monkeypatch.setattr(keeper, "engines_of", engines_of)
    monkeypatch.setattr(keeper, "POLL_S", 0.01)
    told, _ = keep("one", None, name="dp:1")
    assert told == [{"ready": "one"}]
    assert asked == ["dp:1"] * 4 and not others
    assert not killed.exists(), "nobody else would remove it"


@pytest.mark.parametrize("happens", [["one", DraftLost("dead")], [DraftLost("no such file")]])
def test_nothing_is_kept_for_others_if_there_will_be_no_draft(keep, monkeypatch, happens):
    monkeypatch.setattr(keeper, "engines_of", lambda _: pytest.fail("for nothing"))
    assert keep(*happens, max_restarts=0, name="dp:1")[1]


def test_the_draft_is_of_nobodys_group(monkeypatch, tmp_path):
    """Whatever cluster and whatever data parallelism the environment names."""
    from vllm.config import ParallelConfig

    for name in OTHER_RAY:
        monkeypatch.setenv(name, "10.1.2.3:6379")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    monkeypatch.setenv("VLLM_DP_RANK", "1")
    monkeypatch.setenv("VLLM_DP_MASTER_PORT", "29500")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert ParallelConfig().data_parallel_size == 2
    seen = {}

    def run(self) -> None:
        seen.update(os.environ, size=ParallelConfig().data_parallel_size)

    spec = SimpleNamespace(run_dir=str(tmp_path), name="")
    monkeypatch.setattr(keeper, "detach", lambda _: (None, spec))
    monkeypatch.setattr(keeper.signal, "signal", lambda *_: None)
    monkeypatch.setattr(keeper.Keeper, "run", run)
    keeper.main()
    assert seen and not set(OTHER_RAY) & set(seen)
    assert "VLLM_BATCH_INVARIANT" not in seen
    assert seen["RAY_RAYLET_PID"] == str(os.getpid())
    assert seen["size"] == 1
