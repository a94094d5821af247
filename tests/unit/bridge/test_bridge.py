"""Both ends of a bridge between an engine and a real draft on a CPU. Calls of Ray are made in this
process; tests/engine/test_remote_draft.py has a real Ray between two nodes."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from ray import exceptions

from benchmarks.common.running import leftovers
from tests.support.common_options import COMMON_OPTIONS
from tests.support.loaded_draft import VOCAB
from tests.support.sentences import refused
from tests.unit.draft.loop import PROMPT, Reference, Target
from tests.unit.service.fake_service import until
from tests.unit.service.test_served_engine import Running
from vllm_ssd.bridge import finding, near, site
from vllm_ssd.bridge.changes import Plan, encode
from vllm_ssd.bridge.near import Near, NearSpec
from vllm_ssd.bridge.site import Site
from vllm_ssd.table import ASLEEP, SpeculationTable, rundir
from vllm_ssd.table.draft_names import NoDraftServer
from vllm_ssd.table.messages import Join, Leave, Reload, Remove, Wake, ask
from vllm_ssd.table.service_state import draft_lives
from vllm_ssd.table.sockets import Sockets
from vllm_ssd.worker.client import SpeculationClient
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.waiting import WaitPolicy

ANSWER_S = 60.0


class Link:
    """What ``near`` uses of the module ``ray``. cut: no call gets an answer."""

    exceptions = exceptions

    def __init__(self):
        self.cut = False
        self._threads = ThreadPoolExecutor(16)

    def actor(self, of):
        """A handle of it."""
        calls = {
            name: SimpleNamespace(remote=partial(self._threads.submit, getattr(of, name)))
            for name in ("describe", "status", "join", "push", "pull", "leave", "wake")
        }
        return SimpleNamespace(**calls)

    def get(self, task, timeout=None):
        try:
            if self.cut:
                time.sleep(timeout or 0.0)
                raise TimeoutError
            return task.result(ANSWER_S)
        except TimeoutError as error:
            raise exceptions.GetTimeoutError from error

    def statuses(self, sites, limit_s):
        found = [] if self.cut else [(each, each.status.remote().result()) for each in sites]
        return [(each, status) for each, status in found if status is not None]


class Bridge:
    """Both ends; that of the target works in a thread."""

    def __init__(self, server, monkeypatch):
        self.link, self.sites = Link(), []
        self.add(server)
        monkeypatch.setattr(near, "connect", lambda _: self.link)
        monkeypatch.setattr(near, "find_sites", lambda _: [self.link.actor(s) for s in self.sites])
        monkeypatch.setattr(near, "statuses", self.link.statuses)
        spec = NearSpec("", "drafts", COMMON_OPTIONS.model, "auto", server.table.shape)
        self.near = Near(spec, Sockets())
        self.run_dir = self.near.run_dir
        self.service = SpeculationTable.open(rundir.table_path(self.run_dir))
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._step, self._tend)]
        for thread in self._threads:
            thread.start()
        until(self.lives)

    def add(self, server):
        self.sites.append(Site())
        self.sites[-1].open(server.run_dir, COMMON_OPTIONS, 4)

    def lives(self):
        return draft_lives(self.service)

    def ask(self, message):
        return ask(self.run_dir, message, ANSWER_S)

    def join(self, engine):
        return self.ask(Join(str(engine.run_dir)))

    def _step(self):
        while not self._ended.is_set():
            self.near.step()

    def _tend(self):
        while not self._ended.wait(0.05):
            for each in self.sites:
                each.end_silent(0.05)

    def stop(self):
        if not self._ended.is_set():
            self._ended.set()
            for thread in self._threads:
                thread.join()
            self.near.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    one = Running(tmp_path_factory.mktemp("draft"))
    one.reference = Reference(one.model)
    yield one
    one.stop()


@pytest.fixture
def bridge(server, monkeypatch):
    monkeypatch.setattr(near, "SILENT_S", 2.0)
    monkeypatch.setattr(near, "SEARCH_S", 0.05)
    monkeypatch.setattr(site, "SILENT_S", 4.0)
    one = Bridge(server, monkeypatch)
    yield one
    one.stop()


@pytest.fixture
def engine(server, bridge):
    """One that has joined."""
    one = server.engine()
    connection = Connection(one.table, one.control, WaitPolicy("wait", 5.0), VOCAB, 128)
    one.client = SpeculationClient(connection)
    assert bridge.join(one) == ""
    # Of the test before, one may be there for as long as nobody has looked at who is gone.
    until(lambda: server.joined() == 1)
    yield one
    one.remove()


def play(server, engine, rounds, name="one"):
    """Rounds of a request whose target says what the draft says: accepted drafts of each."""
    target = Target(name, PROMPT, server.reference)
    engine.client.add(name, PROMPT)
    accepted = []
    for _ in range(rounds):
        target.round(engine.client)
        accepted.append(len(target.drafts))
    engine.client.remove(name)
    return accepted


def test_drafts_are_those_of_a_draft_that_is_near(server, engine, bridge):
    """Draft and target are one function: every round is a hit, and accepts all k."""
    k = server.table.shape.k
    assert play(server, engine, 12) == [k] * 12
    assert play(server, engine, 5, "another") == [k] * 5
    counted = engine.table.target[0]
    assert counted["rounds"] == 17 and counted["misses"] == counted["timeouts"] == 0
    assert bridge.service.draft["link_us"][0] > 0


def test_what_does_not_fit_is_refused(server, bridge, tmp_path):
    shape = server.table.shape
    sizes = {}, {"k": shape.k + 1}, {"slots": 1025}, {"tail": 2 * shape.tail}
    fits, other, wide, long = (server.engine(**each) for each in sizes)
    for run_dir, said in (
        (other.run_dir, "made for k=3"),
        (wide.run_dir, "or the draft server with --max-num-seqs 1025"),
        (long.run_dir, "texts' last 4096 tokens"),
        (tmp_path, "No such file"),
    ):
        answer = bridge.ask(Join(str(run_dir)))
        assert answer is not None and said in answer
    bridge.sites[0]._options = replace(COMMON_OPTIONS, model="another")
    assert "it has the model 'another' now, and this engine began with" in bridge.join(fits)
    bridge.sites[0]._options = COMMON_OPTIONS
    assert bridge.join(fits) == "" and fits.predicted(3) == server.expected
    for one in (fits, other, wide, long):
        one.remove()


def test_a_silent_link_is_waited_for_by_nobody(server, bridge, engine):
    """Its sessions are over at both ends; later the engine joins again and all is as before."""
    k = server.table.shape.k
    assert play(server, engine, 3) == [k] * 3
    bridge.link.cut = True
    until(lambda: not engine.alive() and not bridge.service.draft["heartbeat"][0])
    assert "is lost" in bridge.join(engine)
    until(lambda: server.joined() == 0)
    bridge.link.cut = False
    until(bridge.lives)
    assert not engine.alive(), "it has to ask"
    assert bridge.join(engine) == ""
    assert play(server, engine, 3, "another") == [k] * 3


def test_a_draft_that_is_away(server, bridge, engine, tmp_path):
    """As if it were here: it has no heartbeat, and then the engine joins again."""
    problem = ask(server.run_dir, Reload(str(tmp_path)), 60)
    assert problem is not None and f"cannot be loaded from {tmp_path}" in problem
    until(lambda: not engine.alive())
    until(bridge.lives)
    assert bridge.join(engine) == ""
    assert engine.predicted(7) == server.expected


def test_a_draft_that_sleeps_with_its_last_engine(server, bridge, engine):
    """And is woken from here; of one that cannot be heard nobody says that it sleeps."""

    def asleep():
        return bridge.service.draft["away"][0] == ASLEEP

    assert bridge.ask(Leave(str(engine.run_dir), asleep=True)) == ""
    until(asleep)
    assert server.joined() == 0 and not (bridge.lives() or engine.alive())
    bridge.link.cut = True
    until(lambda: not asleep())
    bridge.link.cut = False
    until(asleep)
    assert bridge.ask(Wake()) == ""
    until(bridge.lives)
    assert not asleep() and bridge.join(engine) == ""
    assert engine.predicted(5) == server.expected


def test_the_draft_with_the_fewest_engines_is_joined(server, bridge, engine, tmp_path):
    """Here one has an engine of its own node, and the other one has none."""
    second, other = Running(tmp_path), server.engine()
    try:
        assert bridge.ask(Leave(str(engine.run_dir))) == ""
        until(lambda: server.joined() == 0)
        assert ask(server.run_dir, Join(str(other.run_dir)), ANSWER_S) == ""
        bridge.add(second)
        until(lambda: bridge.ask(Join(str(engine.run_dir), 0)) == "")
        assert second.joined() == 1
        assert engine.predicted(3) == second.expected
    finally:
        other.remove()
        second.stop()


def test_what_one_end_says_wrong_ends_the_session(server, bridge, engine):
    (name,) = bridge.sites[0]._sessions
    with pytest.raises(ValueError, match="there is no slot 7"):
        bridge.sites[0].push(name, encode([Remove(7, 1)]))
    bridge.sites[0].leave(name)
    assert not bridge.sites[0].push(name, encode([Plan(True)]))
    assert bridge.sites[0].pull(name) is None
    until(lambda: not engine.alive())
    assert bridge.join(engine) == "" and engine.predicted(3) == server.expected


def test_what_all_engines_have_in_common(server, bridge, monkeypatch):
    """An engine asks in a process of its own; here it is this one."""
    problem = "there is no draft server 'drafts' in the Ray cluster at auto: start it with"

    minute = count()

    def ask_for():
        return finding.described("auto", "drafts", next(minute))

    def run(command, **_):
        return SimpleNamespace(stdout=json.dumps(finding._find(*command[-2:])).encode())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(finding, "connect", lambda _: bridge.link)
    monkeypatch.setattr(finding, "find_sites", near.find_sites)
    assert ask_for() == COMMON_OPTIONS
    for what, other, said, kind in (
        ("find_sites", lambda _: [], problem, NoDraftServer),
        ("VERSIONS", [0, 0], "install the same vllm-ssd", ValueError),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(finding, what, other)
            with refused(said, kind=kind):
                ask_for()


def test_a_cluster_that_does_not_answer():
    """Ray itself would try for ever."""
    program = "from vllm_ssd.bridge import cluster as c; c.REACH_S = 1.5; c.connect('127.0.0.1:1')"
    run = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=120)
    assert run.returncode == 2
    assert b"the Ray cluster at 127.0.0.1:1 does not answer within 1.5 s" in run.stderr


def test_nothing_is_left(server, bridge, engine):
    (session,) = bridge.sites[0]._sessions.values()
    bridge.stop()
    until(lambda: server.joined() == 0)
    assert not leftovers(bridge.run_dir, [])
    until(lambda: not leftovers(session._run_dir, []))
    assert engine.run_dir.exists() and not engine.alive()
