"""Who may talk to the draft's end of a relay, and what a full or broken link does."""

import fcntl
import os
import resource
import socket
import time

import msgspec
import pytest
import zmq

from tests.support.sentences import one_sentence
from vllm_ssd.protocol.sockets import Sockets
from vllm_ssd.relay.keys import (
    addresses_of,
    endpoint_of,
    make_keys,
    new_pair,
    prepare_keys,
    read_keys,
)
from vllm_ssd.relay.link import DraftLink, TargetLink

HEARD_S, SILENCE_S = 120.0, 0.3
FD_SETSIZE = 1024


class Place:
    """The draft's end, which listens and only notes what it hears."""

    def __init__(self):
        self.sockets = Sockets()
        self.heard = []
        self.keys = make_keys("drafts", ["127.0.0.1:0"])
        self.link = DraftLink(self.sockets, self.keys, 0, lambda *said: self.heard.append(said))
        address = f"127.0.0.1:{self.link.port}"
        self.keys = msgspec.structs.replace(self.keys, addresses=[address])

    def hears(self, theirs=None, seconds=HEARD_S):
        """Whether something comes."""
        deadline = time.monotonic() + seconds
        before = len(self.heard)
        while len(self.heard) == before and time.monotonic() < deadline:
            self.sockets.drain()
            if theirs is not None:
                theirs.drain()
            time.sleep(1e-3)
        return len(self.heard) > before


@pytest.fixture
def place():
    one = Place()
    yield one
    one.sockets.close()


@pytest.fixture
def connect(place):
    """Makes a target's end."""
    made = []

    def connect(**other):
        sockets = Sockets()
        made.append(sockets)
        heard = []
        keys = msgspec.structs.replace(place.keys, **other)
        link = TargetLink(sockets, keys, 0, heard.append)
        link.heard = heard
        return sockets, link

    yield connect
    for sockets in made:
        sockets.close()


def test_a_stranger_is_not_heard(place, connect):
    """With a key that is not on the list, or with the wrong idea of whom it talks to."""
    public, secret = new_pair()
    other_server, _ = new_pair()
    for wrong in (
        {"clients": [public], "client_secret": secret},
        {"server_public": other_server},
    ):
        sockets, link = connect(**wrong)
        link.send(b"let me in")
        assert not place.hears(sockets, SILENCE_S)
    _, link = connect()
    assert link.send(b"one") and place.hears()
    assert [message for _, message in place.heard] == [b"one"]


def test_who_has_no_keys_is_not_heard(place, connect):
    """ZeroMQ without encryption, and bytes that are anything."""
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(endpoint_of(place.keys.addresses[0]))
    plain.send(b"hello")
    host, port = place.keys.addresses[0].split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(os.urandom(4096))
        assert not place.hears(None, SILENCE_S)
    plain.close(linger=0)
    context.term()
    _, link = connect()
    assert link.send(b"one") and place.hears()


def test_a_full_link_takes_no_more(place, connect):
    """Nobody reads: some messages find room, and then none does, at either end."""
    _, link = connect()
    message = bytes(2**20)
    assert sum(link.send(message) for _ in range(100)) < 50
    _, another = connect()
    assert another.send(b"one") and place.hears()
    ((sender, _),) = [said for said in place.heard if said[1] == b"one"] or place.heard[:1]
    assert sum(place.link.send(sender, message) for _ in range(100)) < 50


def test_who_is_gone(place, connect):
    _, link = connect()
    assert link.send(b"one") and place.hears()
    ((sender, _),) = place.heard
    link.close()
    deadline = time.monotonic() + HEARD_S
    with pytest.raises(ConnectionError):
        while time.monotonic() < deadline:
            place.sockets.drain()
            place.link.send(sender, b"there?")
            time.sleep(0.01)


def test_descriptors_may_be_many(place):
    """Those of many engines have numbers that ``select`` does not know."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most <= FD_SETSIZE:
        pytest.skip(f"this user may have {most} open files")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, FD_SETSIZE)
        place.sockets.add(high, lambda: place.heard.append(os.read(high, 1)))
        ours.send(b"x")
        place.sockets.wait(HEARD_S)
        place.sockets.drain()
        place.sockets.remove(high)
        os.close(high)
    assert place.heard == [b"x"]


def test_an_address_that_is_taken(place):
    sockets = Sockets()
    with pytest.raises(OSError, match="cannot listen at"):
        DraftLink(sockets, place.keys, 0, lambda *_: None)
    sockets.close()


def test_the_key_file(tmp_path):
    path = tmp_path / "drafts.key"
    prepare_keys(path, "drafts", "10.0.0.5:7400", 1)
    assert path.stat().st_mode & 0o777 == 0o600
    keys = read_keys(path)
    prepare_keys(path, "drafts", "10.0.0.5:7400", 1)
    assert read_keys(path) == keys, "engines have copies"
    assert len(keys.clients) == 1 and keys.client_secret
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_file_of_another_user(tmp_path, monkeypatch):
    """A link to one's own will do."""
    path, link = tmp_path / "drafts.key", tmp_path / "link"
    prepare_keys(path, "drafts", "10.0.0.5:7400", 1)
    link.symlink_to(path)
    assert read_keys(link) == read_keys(path)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(ValueError, match="cannot be read \\(it is not a file of this user's\\)"):
        read_keys(path)


def test_each_draft_has_a_port():
    assert addresses_of("[fd00::5]:7400", 2) == ["[fd00::5]:7400", "[fd00::5]:7401"]
    assert addresses_of("10.0.0.5:0", 2) == ["10.0.0.5:0"] * 2, "any free ones"


@pytest.mark.parametrize(
    "prepare, said",
    [
        (lambda path: prepare_keys(path, "drafts", "10.0.0.5", 1), "is not HOST:PORT"),
        (lambda path: prepare_keys(path, "drafts", "10.0.0.5:x", 1), "is not HOST:PORT"),
        (lambda path: prepare_keys(path, "drafts", "0.0.0.0:7400", 1), "is every address of this"),
        (lambda path: prepare_keys(path / "no" / "key", "drafts", "h:1", 1), "cannot be written"),
        (lambda path: prepare_keys(path, "other", "h:1", 1), "is the key file of 'drafts' at h:1"),
        (lambda path: prepare_keys(path, "drafts", "h:1", 2), "is the key file of 'drafts' at h:1"),
        (lambda path: prepare_keys(path, "drafts", "h:65535", 2), "'h:65536' is not HOST:PORT"),
        (lambda path: path.chmod(0o644), "can be read by others (mode 644)"),
        (lambda path: path.write_text("{}"), "is no key file"),
        (
            lambda path: path.write_text(path.read_text().replace('c": "', 'c": "x')),
            "is no key file",
        ),
        (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read (it is not a file of this"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "cannot be read (it is not a file of this"),
    ],
)
def test_key_files_that_will_not_do(tmp_path, prepare, said):
    path = tmp_path / "drafts.key"
    prepare_keys(path, "drafts", "h:1", 1)
    with pytest.raises(ValueError) as error:
        prepare(path)
        read_keys(path)
    assert said in one_sentence(error)
