"""Control messages over a real socket."""

import gc
import threading
import weakref

import msgspec
import pytest
import zmq

from vllm_ssd.table.messages import DIED, Add, ControlClient, Reload, Remove, Wake, ask, endpoint
from vllm_ssd.table.sockets import Sockets


def listening(folder, handlers):
    server = Sockets()
    server.serve(folder, handlers)
    return server


def drain(server, wait_s=5.0):
    server.wait(wait_s)
    server.drain()


def collecting(seen):
    """Handlers that only note what comes."""
    return dict.fromkeys((Add, Remove, Wake, Reload), seen.append)


@pytest.fixture
def wire(tmp_path):
    seen: list[object] = []
    server = listening(tmp_path, collecting(seen))
    client = ControlClient(tmp_path)
    client.send(Remove(1, 2))
    while not seen:
        drain(server)
    yield server, client, seen
    client.close()
    server.close()


def test_messages_to_a_server_that_is_away_reach_the_next_one(wire, tmp_path):
    """Killed, it leaves its socket's file behind. What it had taken in is lost with it."""
    server, client, seen = wire
    path = tmp_path / "control.sock"
    path.rename(tmp_path / "kept")
    server.close()
    (tmp_path / "kept").rename(path)
    sent = [Add(1, generation, [5] * 1000) for generation in range(3, 8)]
    assert all(client.send(message) for message in sent)
    later = listening(tmp_path, collecting(seen))
    while len(seen) < 1 + len(sent):
        drain(later)
    assert seen[1:] == sent
    later.close()


def test_a_draft_that_takes_over_gets_what_is_sent_after_a_reconnection(wire, tmp_path):
    """The one before hangs, and its connection lives on."""
    server, client, seen = wire
    successor = listening(tmp_path, collecting(later := []))
    client.reconnect()
    client.send(Remove(3, 4))
    while not later and len(seen) == 1:
        drain(server, 0.05)
        drain(successor, 0.05)
    assert later == [Remove(3, 4)] and seen == [Remove(1, 2)]
    successor.close()


def test_several_addresses_and_one_of_them_no_longer(tmp_path):
    """Each message is handled where it came; who is hung up on is heard by the next one."""
    seen: dict[str, list[object]] = {"one": [], "two": []}
    server, clients, sockets = Sockets(), {}, {}
    for name, heard in seen.items():
        (tmp_path / name).mkdir()
        sockets[name] = server.serve(tmp_path / name, collecting(heard))
        clients[name] = ControlClient(tmp_path / name)
    for round_ in range(1, 21):
        for slot, (name, client) in enumerate(clients.items()):
            message = Remove(slot, round_)
            while message not in seen[name]:  # one that is on its way to who hangs up is lost
                client.send(message)
                drain(server, 0.2)
        server.remove(sockets["two"])
        sockets["two"] = server.serve(tmp_path / "two", collecting(seen["two"]))
    for slot, heard in enumerate(seen.values()):
        assert {message.slot for message in heard} == {slot}
    for client in clients.values():
        client.close()
    server.close()


def test_malformed_messages_are_consumed_and_reported(wire, tmp_path, caplog):
    server, client, seen = wire
    raw = zmq.Context().socket(zmq.DEALER)
    raw.connect(endpoint(tmp_path))
    unknown = msgspec.msgpack.encode({"type": "Leave", "run_dir": "x"})  # nobody handles it here
    for body in (b"", b"junk", msgspec.msgpack.encode({"type": "Add", "slot": "x"}), unknown):
        raw.send(body)
        caplog.clear()
        while not caplog.records:
            drain(server)
        assert "ignored a malformed control message" in caplog.text
    client.send(Remove(3, 4))
    while len(seen) == 1:
        drain(server)
    assert seen == [Remove(1, 2), Remove(3, 4)]
    raw.close(linger=0)


def test_sending_to_nobody_does_not_block(tmp_path):
    client = ControlClient(tmp_path)
    results = [client.send(Remove(0, 1)) for _ in range(3000)]
    assert results[0] and not results[-1]
    client.close()


def test_a_client_that_is_forgotten_holds_up_nobody(tmp_path):
    """In a circle, whose parts end in any order."""
    client = ControlClient(tmp_path)
    client.itself = client
    forgotten = weakref.ref(client)
    del client
    gc.collect()
    assert forgotten() is None


def asking(folder, *given_up):
    """A thread that asks for a long time, and the list that its answer comes to."""
    answers: list[str | None] = []
    thread = threading.Thread(
        target=lambda: answers.append(ask(folder, Wake(), 300, *given_up)), daemon=True
    )
    thread.start()
    return thread, answers


def test_a_draft_that_died_with_the_question_is_not_waited_for(tmp_path):
    seen: list[object] = []
    server = listening(tmp_path, collecting(seen))
    thread, answers = asking(tmp_path)
    while not seen:
        drain(server)
    server.close()
    thread.join(30)
    assert answers == [DIED]


def test_a_draft_that_is_started_meanwhile_gets_the_question(tmp_path):
    thread, answers = asking(tmp_path)
    server = listening(tmp_path, {**collecting([]), Wake: lambda _: "done"})
    while thread.is_alive():
        drain(server, 0.1)
    assert answers == ["done"]
    server.close()


def test_a_draft_that_will_not_come_is_not_waited_for(tmp_path):
    gone: list[bool] = []
    thread, answers = asking(tmp_path, lambda: bool(gone))
    assert thread.is_alive() and not answers
    gone.append(True)
    thread.join(30)
    assert answers == [None]


def test_what_was_asked_too_long_ago_is_withdrawn(tmp_path):
    assert ask(tmp_path, Wake(), 0.05) is None
    seen: list[object] = []
    server = listening(tmp_path, collecting(seen))
    drain(server, 0.3)
    assert not seen
    server.close()
