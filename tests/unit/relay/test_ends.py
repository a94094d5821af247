"""Both ends of a relay between an engine and a real draft on a CPU, over a real connection."""

import socket
import threading
import time
from contextlib import ExitStack

import msgspec
import pytest

from benchmarks.common.running import leftovers
from tests.support.common_options import COMMON_OPTIONS, changed
from tests.support.loaded_draft import VOCAB
from tests.support.sentences import one_sentence
from tests.unit.draft.loop import PROMPT, Reference, Target
from tests.unit.lifecycle.test_joined_draft import said as logged
from tests.unit.lifecycle.test_served_engine import Engine, Running, until
from vllm_ssd.protocol import ASLEEP, SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.protocol.heartbeat import draft_lives
from vllm_ssd.protocol.messages import Join, Leave, Reload, Remove, Wake, ask
from vllm_ssd.protocol.sockets import Sockets
from vllm_ssd.relay import draft_end, finding, target_end
from vllm_ssd.relay.draft_end import DraftEnd, DraftEndSpec
from vllm_ssd.relay.finding import described
from vllm_ssd.relay.frames import (
    Hello,
    Joined,
    Malformed,
    Opening,
    Refused,
    Told,
    decode_to_target,
    encode,
)
from vllm_ssd.relay.keys import make_keys, read_keys, write_keys
from vllm_ssd.relay.link import TargetLink
from vllm_ssd.relay.peer import Peer
from vllm_ssd.relay.target_end import TargetEnd, TargetEndSpec
from vllm_ssd.worker.client import SpeculationClient
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.waiting import WaitPolicy

ANSWER_S = 60.0


class Stranger:
    """A target's end that says what it is told to."""

    def __init__(self, keys):
        self._sockets, self._messages = Sockets(), []
        self._link = TargetLink(self._sockets, keys, 0, self._messages.append)

    def say(self, *frames):
        self._link.send(encode(frames))

    def heard(self, kind):
        """The last frame of this type, None if there was none."""
        self._sockets.drain()
        found = [frame for message in self._messages for frame in decode_to_target(message)]
        return next((frame for frame in reversed(found) if isinstance(frame, kind)), None)

    def close(self):
        self._sockets.close()


class Stepping:
    """Has one end work in a thread, unless it is ``paused``. turn: held during a step."""

    def __init__(self, end):
        self.end = end
        self.paused = False
        self.turn = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._ended.is_set():
            if self.paused:
                time.sleep(0.01)
            else:
                with self.turn:
                    self.end.step()

    def stop(self):
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self.end.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    one = Running(tmp_path_factory.mktemp("draft"))
    one.reference = Reference(one.model)
    yield one
    one.stop()


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "drafts.key"
    write_keys(path, make_keys("drafts", ["127.0.0.1:0"]))
    return path


@pytest.fixture
def relay(server, key_file, monkeypatch):
    """The draft's end, and the target's."""
    monkeypatch.setattr(target_end, "SILENT_S", 1.0)
    monkeypatch.setattr(target_end, "REFUSED_S", 0.02)
    monkeypatch.setattr(draft_end, "PEER_GONE_S", 2.0)
    with ExitStack() as ends:
        keys = read_keys(key_file)
        spec = DraftEndSpec(str(server.run_dir), COMMON_OPTIONS, keys, 0, 4)
        theirs = Stepping(DraftEnd(spec, Sockets()))
        ends.callback(theirs.stop)
        write_keys(key_file, msgspec.structs.replace(keys, addresses=[theirs.end.word]))
        shape = server.table.shape
        spec = TargetEndSpec("", "drafts", str(key_file), 0, shape)
        ours = Stepping(TargetEnd(spec, Sockets()))
        ends.callback(ours.stop)
        service = SpeculationTable.open(rundir.table_path(ours.end.run_dir))
        until("draft", lambda: draft_lives(service))
        yield theirs, ours


@pytest.fixture
def connect(relay, key_file):
    """Makes strangers, who have the keys unless they have others."""
    keys = read_keys(key_file)
    with ExitStack() as ends:

        def made(**other):
            one = Stranger(msgspec.structs.replace(keys, **other))
            ends.callback(one.close)
            return one

        yield made


@pytest.fixture
def engine(server, relay):
    """One that has joined."""
    shape = server.table.shape
    one = Engine(TableShape(3, shape.k, shape.branches))
    connection = Connection(one.table, one.control, WaitPolicy("wait", 5.0), VOCAB, 128)
    one.client = SpeculationClient(connection)
    assert join(relay, one) == ""
    # Of the test before, one may be there for as long as nobody has looked at who is gone.
    until("end of all others", lambda: server.joined() == 1)
    yield one
    one.control.close()
    one.files.remove()


def join(relay, engine):
    return ask(relay[1].end.run_dir, Join(str(engine.run_dir)), ANSWER_S)


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


def test_drafts_are_those_of_a_draft_that_is_near(server, engine):
    """Draft and target are one function: every round is a hit, and accepts all k."""
    k = server.table.shape.k
    assert play(server, engine, 12) == [k] * 12
    assert play(server, engine, 5, "another") == [k] * 5
    counted = engine.table.target[0]
    assert counted["rounds"] == 17 and counted["misses"] == counted["timeouts"] == 0


def test_what_does_not_fit_is_refused(server, relay, tmp_path):
    shape = server.table.shape
    fits, other, wide, long = (
        Engine(TableShape(slots, k, shape.branches, tail))
        for slots, k, tail in (
            (3, shape.k, shape.tail),
            (3, shape.k + 1, shape.tail),
            (1025, shape.k, shape.tail),
            (3, shape.k, 2 * shape.tail),
        )
    )
    for run_dir, said in (
        (other.run_dir, "made for k=3"),
        (wide.run_dir, "or the draft server with --max-num-seqs 1025"),
        (long.run_dir, "texts' last 4096 tokens"),
        (tmp_path, "No such file"),
    ):
        answer = ask(relay[1].end.run_dir, Join(str(run_dir)), ANSWER_S)
        assert answer is not None and said in answer
    refused = ask(relay[1].end.run_dir, Reload("folder"), ANSWER_S)
    assert refused is not None and "is shared by all engines" in refused
    assert join(relay, fits) == "" and fits.predicted(3) == server.expected
    for one in (fits, other, wide, long):
        one.control.close()
        one.files.remove()


def test_a_silent_link_is_waited_for_by_nobody(server, relay, engine):
    """Its sessions are over at both ends; later the engine joins again and all is as before."""
    theirs, ours = relay
    k = server.table.shape.k
    service = SpeculationTable.open(rundir.table_path(ours.end.run_dir))
    assert play(server, engine, 3) == [k] * 3
    theirs.paused = True
    until("silence", lambda: not engine.alive())
    assert not service.draft["heartbeat"][0]
    time.sleep(2.5)  # some connections in vain
    theirs.paused = False
    until("draft", lambda: draft_lives(service))
    until("end of the session", lambda: server.joined() == 0)
    assert not engine.alive(), "it has to ask"
    assert join(relay, engine) == ""
    assert play(server, engine, 3, "another") == [k] * 3


def test_an_end_that_gets_no_time_does_not_lose_the_other(server, relay, engine):
    """Its own pause is not the other's silence: no question of it is open."""
    theirs, ours = relay
    ours.paused = theirs.paused = True
    with theirs.turn, ours.turn:
        ours.end._sockets.drain()
        peer = ours.end._peer
        time.sleep(2.5)
        ours.end.step()
        assert engine.alive() and ours.end._peer is peer
        theirs.end.step()
        assert any(each.mirror for each in theirs.end._peers.values())
    ours.paused = theirs.paused = False
    assert engine.predicted(9) == server.expected


def test_a_refusal_after_an_engine_was_told_that_it_has_joined(server, relay, engine):
    """The answer to its former try came late and was taken for that to this one."""
    _, ours = relay
    with ours.turn:
        ours.end._take(Joined("the draft has no room"))
    until("loss", lambda: not engine.alive())
    until("end of the session", lambda: server.joined() == 0)
    assert join(relay, engine) == ""
    assert engine.predicted(3) == server.expected


def test_a_draft_that_is_away(server, relay, engine, tmp_path):
    """As if it were here: it has no heartbeat, and then the engine joins again."""
    _, ours = relay
    service = SpeculationTable.open(rundir.table_path(ours.end.run_dir))
    problem = ask(server.run_dir, Reload(str(tmp_path)), 60)
    assert problem is not None and f"cannot be loaded from {tmp_path}" in problem
    until("loss", lambda: not engine.alive())
    until("draft", lambda: draft_lives(service))
    assert join(relay, engine) == ""
    assert engine.predicted(7) == server.expected


def test_a_draft_that_sleeps_with_its_last_engine(server, relay, engine):
    """And is woken from here; of one that cannot be heard nobody says that it sleeps."""
    theirs, ours = relay
    service = SpeculationTable.open(rundir.table_path(ours.end.run_dir))

    def asleep():
        return service.draft["away"][0] == ASLEEP

    assert ask(ours.end.run_dir, Leave(str(engine.run_dir), asleep=True), ANSWER_S) == ""
    until("sleep", asleep)
    assert server.joined() == 0 and not (draft_lives(service) or engine.alive())
    theirs.paused = True
    until("silence", lambda: not asleep())
    theirs.paused = False
    until("word of it", asleep)
    assert ask(ours.end.run_dir, Wake(), ANSWER_S) == ""
    until("draft", lambda: draft_lives(service))
    assert not asleep() and join(relay, engine) == ""
    assert engine.predicted(5) == server.expected


def opening(server, name):
    shape = server.table.shape
    return Opening(name, TableShape(2, shape.k, shape.branches, shape.tail), TableOwner())


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda server: Told(Remove(7, 1)), "there is no slot 7"),
        (lambda server: Hello(), "a second greeting on one connection"),
        (
            lambda server: opening(server, "a" * 300),
            "cannot be read: Expected `str`",
        ),
    ],
    ids=["slot", "greeting", "name"],
)
def test_what_is_said_wrong_ends_the_session(server, engine, connect, wrong, said):
    """By somebody who has the keys: others go on, and nothing of it is left."""
    before = set(rundir.living())
    stranger = connect()
    stranger.say(Hello(), opening(server, "stranger"))
    until("session", lambda: stranger.heard(Joined))
    until("it", lambda: server.joined() == 2)
    stranger.say(wrong(server))
    until("refusal", lambda: stranger.heard(Refused))
    assert said in stranger.heard(Refused).why
    until("end of the session", lambda: server.joined() == 1 and set(rundir.living()) == before)
    assert engine.predicted(3) == server.expected


def test_an_error_about_one_engine_is_not_that_of_all(server, engine, connect, monkeypatch):
    def fail(*_):
        raise IndexError("unforeseen")

    stranger = connect()
    stranger.say(Hello(), opening(server, "stranger"))
    until("session", lambda: stranger.heard(Joined))
    with monkeypatch.context() as patched:
        patched.setattr(Peer, "tell", fail)
        stranger.say(Told(Remove(1, 1)))
        until("refusal", lambda: stranger.heard(Refused))
    assert "failed (IndexError): see its log" in stranger.heard(Refused).why
    until("end of the session", lambda: server.joined() == 1)
    assert engine.predicted(3) == server.expected


def test_ends_that_do_not_understand_each_other(relay, caplog, monkeypatch):
    """As where one node has another version: a line for each cause, until they do."""
    service = SpeculationTable.open(rundir.table_path(relay[1].end.run_dir))
    why, heard = "another version", []

    def refuse(message):
        heard.append(why)
        raise Malformed(why)

    with monkeypatch.context() as patched:
        patched.setattr(draft_end, "decode_to_draft", refuse)
        until("tries", lambda: len(heard) > 3)
        until("loss", lambda: not draft_lives(service))
        assert logged(caplog) == [f"SSD: the relay of 'drafts': {why}"]
        why = "yet another"
        until("tries", lambda: heard.count(why) > 1)
    until("draft", lambda: draft_lives(service))
    assert len(logged(caplog)) == 2


def test_what_all_engines_have_in_common(relay, key_file):
    options = {"draft_server": "drafts", "draft_server_key": str(key_file)}
    assert described(options) == COMMON_OPTIONS
    assert described({"draft_server": "drafts"}) is None
    for wrong, said in (
        ({"draft_server": "other"}, "is the key file of the draft server 'drafts', and not of"),
        ({"draft_server": None}, "add its name as draft_server"),
        ({"draft_server_key": str(key_file) + "s"}, "cannot be read (No such file or directory)"),
    ):
        with pytest.raises(ValueError) as error:
            described({**options, **wrong})
        assert said in one_sentence(error)


@pytest.mark.parametrize(
    "answer, said",
    [
        (["Welcome", changed(max_wait_ms=1e9)], "unknown field `max_wait_ms`"),
        (["Joined", ""], "answers neither a welcome nor a refusal"),
    ],
)
def test_a_draft_server_decides_nothing_else(relay, key_file, monkeypatch, answer, said):
    finding._ask.cache_clear()
    monkeypatch.setattr(draft_end, "Welcome", lambda _: answer)
    with pytest.raises(ValueError) as error:
        described({"draft_server": "drafts", "draft_server_key": str(key_file)})
    assert "the draft server 'drafts' at 127.0.0.1:" in one_sentence(error)
    assert said in one_sentence(error)


def test_a_service_that_does_not_answer(server, key_file, monkeypatch):
    monkeypatch.setattr(finding, "REACH_S", 0.3)
    keys = read_keys(key_file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        write_keys(key_file, msgspec.structs.replace(keys, addresses=[address]))
        with pytest.raises(ValueError) as error:
            described({"draft_server": "drafts", "draft_server_key": str(key_file)})
    assert f"does not answer at {address}: see that" in one_sentence(error)


def test_nothing_is_left(server, relay, engine):
    theirs, ours = relay
    ours_dir = ours.end.run_dir
    (peer,) = (peer for peer in theirs.end._peers.values() if peer.mirror)
    theirs_dir = peer.run_dir
    ours.stop()
    until("end of the session", lambda: server.joined() == 0)
    assert not leftovers(ours_dir, [])
    until("end", lambda: not leftovers(theirs_dir, []))
    assert engine.run_dir.exists() and not engine.alive()
