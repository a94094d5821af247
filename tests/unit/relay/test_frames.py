"""What the ends of a relay say to each other: whole, of this version, and no more than fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.common_options import COMMON_OPTIONS, changed
from tests.support.sentences import one_sentence
from vllm_ssd.protocol import TableOwner, TableShape
from vllm_ssd.protocol.messages import Add, Leave, Reload, Remove, Wake
from vllm_ssd.relay import frames
from vllm_ssd.relay.end import Connection
from vllm_ssd.relay.frames import (
    Changed,
    Hello,
    Malformed,
    Opening,
    Ping,
    Status,
    Told,
    Welcome,
    decode_to_draft,
    decode_to_target,
    encode,
)

STAMP = 2**64 - 1
TO_DRAFT = [
    Hello(),
    Ping(2**62, 90),
    Opening("engine", TableShape(256, 7, 24), TableOwner("target", 3)),
    Told(Leave("engine", True)),
    Told(Add(3, 2**32 - 1, [0, 1, 2**31 - 1], 0.7, 2**64 - 1)),
    Told(Remove(3, 2**32 - 1)),
    Told(Wake()),
    Changed(0, 3, STAMP, 100, b"1234", b"12345678"),
]
TO_TARGET = [
    Welcome(COMMON_OPTIONS),
    Status([-1, 2**40], [], 2**62),
    Changed(1, 3, STAMP),
    Changed(3, 3, STAMP, 2, b"", b"12345678", b"1"),
]


def test_frames_arrive_as_they_were():
    assert decode_to_draft(encode(TO_DRAFT)) == TO_DRAFT
    assert decode_to_target(encode(TO_TARGET)) == TO_TARGET


@pytest.mark.parametrize("version", ["VERSION", "TABLE_VERSION"])
def test_another_version_is_named(version, monkeypatch):
    ours = encode(TO_DRAFT)
    place = 0 if version == "VERSION" else 1
    other = bytes(value + (number == place) for number, value in enumerate(ours[:2])) + ours[2:]
    with pytest.raises(Malformed) as error:
        decode_to_draft(other)
    assert "install the same vllm-ssd on both nodes" in one_sentence(error)
    assert ours[1] == frames.TABLE_VERSION


@given(st.data())
def test_cut_messages_are_refused(data):
    message = encode(TO_DRAFT)
    with pytest.raises(Malformed):
        decode_to_draft(message[: data.draw(st.integers(0, len(message) - 1))])


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        TO_TARGET,  # of the other direction
        [["Opening", "e", {"slots": 1, "k": 7, "branches": 24}]],
        [["Opening", "e", {"slots": 0, "k": 7, "branches": 24}, {}]],
        [["Opening", "e", {"slots": "1", "k": 7, "branches": 24}, {}]],
        [["Opening", "e", {"slots": 1, "k": 7, "branches": 24}, {"engine": 2**32}]],
        [["Opening", "e" * 257, {"slots": 1, "k": 7, "branches": 24}, {}]],
        [Told(Add(-1, 1, []))],
        [Told(Add(0, 2**32, []))],
        [Told(Add(0, 1, [], 0.0, -1))],
        [Told(Reload("elsewhere"))],
        [Changed(0, -1, 1)],
        [Changed(-1, 0, 1)],
        [Changed(0, 0, -1)],
        [Changed(0, 0, 1, 2**32)],
        [["Unknown", 1]],
    ],
)
def test_what_is_none_of_them_is_refused(wrong):
    message = wrong if isinstance(wrong, bytes) else encode(wrong)
    with pytest.raises(Malformed):
        decode_to_draft(message)


DEEP = b"\x91" * 100_000 + b"\xc0"  # a list in a list, and so on


@pytest.mark.parametrize(
    "wrong",
    [
        [["Welcome", changed(rejection_sample_method="synthetic")]],
        [["Welcome", changed(saguaro=None)]],
        [["Welcome", changed(k="3")]],
        [["Welcome", changed(draft_sample_method="synthetic")]],
        b"\x91\x93\xa6Joined\xa0" + DEEP,
        b"\x91\x92\xa6Joined\xa1\xff",
    ],
)
def test_what_a_draft_cannot_say_is_refused(wrong):
    """Options that are no common ones, and bytes that no decoder takes."""
    message = encode([])[:2] + wrong if isinstance(wrong, bytes) else encode(wrong)
    with pytest.raises(Malformed) as error:
        decode_to_target(message)
    assert "a message that cannot be read" in one_sentence(error)


def test_a_message_that_is_too_large(monkeypatch):
    monkeypatch.setattr(frames, "LARGEST", 100)
    decode_to_draft(encode([Told(Add(0, 1, [1] * 20))]))
    with pytest.raises(Malformed, match="and the most are 100"):
        decode_to_draft(encode([Told(Add(0, 1, [1] * 100))]))


class Counting:
    """A mirror with something new at each look."""

    def __init__(self):
        self.looks, self.has_requests = 0, True

    def take(self):
        self.looks += 1
        return [Changed(0, 0, self.looks)]


def stamps(sent):
    return [frame.stamp for message in sent for frame in decode_to_target(message)]


def test_a_full_link_is_told_what_is_true_later():
    """Nobody looks for changes as long as there is no room."""
    room, sent, engine = [False], [], Counting()
    connection = Connection(lambda message: room[0] and not sent.append(message))
    connection.mirror = engine
    connection.flush()
    connection.add(Changed(0, 0, 100))
    connection.flush()
    assert engine.looks == 1 and not sent
    room[0] = True
    connection.flush()
    assert engine.looks == 1 and stamps(sent) == [1]
    connection.flush()
    assert stamps(sent) == [1, 100, 2]


def test_large_messages_are_divided(monkeypatch):
    monkeypatch.setattr("vllm_ssd.relay.end._AT_ONCE", 1000)
    sent = []
    connection = Connection(lambda message: not sent.append(message))
    frames_sent = [Changed(0, 0, 1, 0, b"", bytes(300)) for _ in range(9)]
    connection.add(*frames_sent)
    connection.flush()
    assert len(sent) > 3 and max(map(len, sent)) < 1000
    assert [frame for message in sent for frame in decode_to_target(message)] == frames_sent
