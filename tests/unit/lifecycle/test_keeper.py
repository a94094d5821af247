"""What the keeper does with what becomes of a draft server, without Ray."""

import json
import os
import socket
from collections.abc import Callable

import msgspec
import pytest

from vllm_ssd.draft.spec import DraftModelSpec, DraftPolicy
from vllm_ssd.lifecycle import keeper
from vllm_ssd.lifecycle.actor import DraftLost, RayLost
from vllm_ssd.lifecycle.keeper import Keeper
from vllm_ssd.lifecycle.own_ray import OTHER_RAY
from vllm_ssd.lifecycle.server_spec import SPEC_FILE, KeeperSpec, ServerSpec
from vllm_ssd.protocol import rundir


class Script:
    """An actor to which this happens, one thing a look; then ``end`` is called."""

    def __init__(self, end: Callable[[], None], *happens: str | DraftLost | None):
        self._end = end
        self._happens = list(happens)
        self.done: list[str] = []

    def start(self, again: bool) -> None:
        self.done.append("start again" if again else "start")

    def serve(self) -> None:
        self.done.append("serve")

    def result(self) -> str | None:
        if not self._happens:
            self._end()
            return None
        event = self._happens.pop(0)
        if isinstance(event, DraftLost):
            raise event
        return event

    def kill(self) -> None:
        self.done.append("kill")

    def gone(self) -> bool:
        """At the second look."""
        self.done.append("look")
        gone = self.done[-2] == "look"
        if gone and not self._happens:
            self._end()
        return gone

    def give_up(self) -> None:
        self.done.append("give up")

    def close(self) -> None:
        self.done.append("close")


BURIED = ["kill", "look", "look"]


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """What an actor of this script did before it was closed, and what the engine core was told."""

    def run(*happens, max_restarts=3, start_timeout_s=60.0, name=""):
        ours, theirs = socket.socketpair()
        policy = DraftPolicy(2, (1, 1, 1), True, 64)
        model = DraftModelSpec({}, ("sdpa",), 64, None, 2, 8)
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        server = ServerSpec(str(run_dir), model, policy, [], {})
        spec = KeeperSpec(server, start_timeout_s, max_restarts, name)
        (run_dir / SPEC_FILE).write_bytes(msgspec.json.encode(spec))
        actor = Script(lambda: ours.shutdown(socket.SHUT_WR), *happens)
        made_for: list[ServerSpec] = []
        monkeypatch.setattr(
            keeper, "DraftActor", lambda server, _: made_for.append(server) or actor
        )
        with ours, theirs:
            Keeper(run_dir, theirs, again=False).run()
            theirs.close()
            lines = [json.loads(line) for line in ours.makefile("rb")]
        *done, last = actor.done
        assert last == "close" and made_for == [server]
        assert not run_dir.exists()
        return done, [line for line in lines if "awaited" not in line]

    return run


def test_a_lost_draft_is_started_again_until_it_serves(keep):
    done, told = keep(None, "one", None, DraftLost("dead"), DraftLost("no memory"), "two")
    assert told == [{"ready": "one"}, {"lost": "dead"}, {"not_back": "no memory"}, {"back": "two"}]
    again = [*BURIED, "start again"]
    assert done == ["start", "serve", *again, *again, "serve"]


def test_a_process_that_does_not_end(keep, monkeypatch):
    """What is lost is said first, and then that it stays."""
    monkeypatch.setattr(keeper, "SAY_AGAIN_S", 0.0)
    done, told = keep("one", DraftLost("no sign of life"), "two")
    assert told == [
        {"ready": "one"},
        {"lost": "no sign of life"},
        {"stays": "0 s"},
        {"back": "two"},
    ]
    assert done == ["start", "serve", *BURIED, "start again", "serve"]
    monkeypatch.setattr(Script, "gone", lambda self: self._end())
    assert keep("one", DraftLost("no sign of life"))[1][1] == {"lost": "no sign of life"}


def test_up_to_max_restarts(keep):
    dead = [DraftLost("dead")] * 2
    _, told = keep("one", *dead, DraftLost("still"), max_restarts=2)
    assert told == [{"ready": "one"}, {"lost": "dead"}, {"not_back": "dead"}, {"given_up": "still"}]


def test_never(keep):
    done, told = keep("one", DraftLost("dead"), max_restarts=0)
    assert told == [{"ready": "one"}, {"given_up": "dead"}]
    assert done == ["start", "serve", *BURIED, "give up"]


def test_a_ray_that_does_not_come_up_is_started_again(keep):
    """At the first start, too, where a draft that fails is not."""
    done, told = keep(RayLost("port in use"), "one")
    assert told == [{"ready": "one"}]
    assert done == ["start", *BURIED, "start", "serve"]
    assert keep(*[RayLost("no disk")] * 2, max_restarts=1)[1] == [{"failed": "no disk"}]


def test_a_first_start_that_fails_is_not_repeated(keep):
    done, told = keep(DraftLost("no such file"))
    assert told == [{"failed": "no such file"}]
    assert done == ["start", *BURIED, "give up"]


def test_a_later_start_has_a_deadline(keep):
    done, told = keep("one", DraftLost("dead"), None, start_timeout_s=0, max_restarts=1)
    late = "the draft model was not ready within 0 s (start_timeout_s)"
    assert told == [{"ready": "one"}, {"lost": "dead"}, {"given_up": late}]
    assert done[-5:] == ["close", *BURIED, "give up"]


def test_a_server_that_was_told_to_stop_is_lost(keep):
    _, told = keep("one", "stopped", max_restarts=0)
    assert told == [{"ready": "one"}, {"given_up": "stopped"}]


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
    done, told = keep("one", None, name="dp:1")
    assert told == [{"ready": "one"}] and done == ["start", "serve"]
    assert asked == ["dp:1"] * 4 and not others
    assert not killed.exists(), "nobody else would remove it"


@pytest.mark.parametrize("happens", [["one", DraftLost("dead")], [DraftLost("no such file")]])
def test_nothing_is_kept_for_others_if_there_will_be_no_draft(keep, monkeypatch, happens):
    monkeypatch.setattr(keeper, "engines_of", lambda _: pytest.fail("for nothing"))
    done, _ = keep(*happens, max_restarts=0, name="dp:1")
    assert done[-1] == "give up"


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

    monkeypatch.setattr(keeper.os, "fork", lambda: 0)
    monkeypatch.setattr(keeper.signal, "signal", lambda *_: None)
    monkeypatch.setattr(keeper.socket, "socket", lambda **_: None)
    monkeypatch.setattr(keeper.Keeper, "run", run)
    keeper.main(str(tmp_path), "0")
    assert seen and not set(OTHER_RAY) & set(seen)
    assert "VLLM_BATCH_INVARIANT" not in seen
    assert seen["RAY_RAYLET_PID"] == str(os.getpid())
    assert seen["size"] == 1
