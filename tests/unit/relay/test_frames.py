"""What the ends of a relay say to each other: whole, of this version, and no more than fits."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sentences import one_sentence
from vllm_ssd.relay import frames
from vllm_ssd.relay.frames import (
    Added,
    Grown,
    Happened,
    Hello,
    Malformed,
    Open,
    Ping,
    State,
    Status,
    Welcome,
    decode_to_draft,
    decode_to_target,
    encode,
    int32s,
    pack_probs,
    unpack_probs,
)
from vllm_ssd.relay.outbox import Outbox

STAMP = 2**64 - 1
TO_DRAFT = [
    Hello("drafts"),
    Ping(2**62, 90),
    Open(1, "engine", 256, 7, 24, 2048, 32, "target", 0),
    Added(1, 3, 2**32 - 1, np.arange(5, dtype="<i4").tobytes(), 0.7, 2**64 - 1),
    Happened(1, 3, STAMP, 100, -1, b"1234"),
]
TO_TARGET = [
    Welcome({"k": 7, "f": [1, 2], "model": "draft", "revision": None, "saguaro": 0.5}, "a1"),
    Status(0, -1, [0, 2**40, -1]),
    State(1, 3, STAMP),
    Grown(1, 3, STAMP, 2, b"12345678", b""),
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
        [Open(1, "e", 2**15, 7, 24, 2048, 32, "", 0)],
        [Open(1, "e", 1, 7, 24, 2048, 2**9, "", 0)],
        [Open(1, "e" * 300, 1, 7, 24, 2048, 0, "", 0)],
        [Added(1, -1, 1, b"", 0.0, 0)],
        [Added(1, 0, 2**32, b"", 0.0, 0)],
        [Added(1, 0, 1, b"", 0.0, -1)],
        [Happened(0, 0, 1, 1, 0, b"")],
        [Happened(1, 0, 1, 2**32, 0, b"")],
        [["Unknown", 1]],
    ],
)
def test_what_is_none_of_them_is_refused(wrong):
    message = wrong if isinstance(wrong, bytes) else encode(wrong)
    with pytest.raises(Malformed):
        decode_to_draft(message)


def test_a_message_that_is_too_large(monkeypatch):
    monkeypatch.setattr(frames, "LARGEST", 100)
    decode_to_draft(encode([Added(1, 0, 1, bytes(20), 0.0, 0)]))
    with pytest.raises(Malformed, match="and the most are 100"):
        decode_to_draft(encode([Added(1, 0, 1, bytes(100), 0.0, 0)]))


def test_numbers_are_whole_and_no_more_than_fit():
    assert int32s(np.array([1, -2], "<i4").tobytes(), 2).tolist() == [1, -2]
    for data, most in ((bytes(5), 2), (bytes(12), 2)):
        with pytest.raises(Malformed):
            int32s(data, most)


def entries(tokens, probabilities):
    halves = np.empty((*np.shape(tokens), 2), "<i4")
    halves[..., 0] = tokens
    halves[..., 1] = np.asarray(probabilities, "<f4").view("<i4")
    return halves.view("<i8").reshape(np.shape(tokens))


@given(
    st.lists(st.permutations(range(12)), min_size=1, max_size=5),
    st.data(),
)
def test_distributions_without_entries_of_no_mass(rows, data):
    """What has mass arrives to the last bit, and the tokens of a row still differ."""
    top_m = 6
    tokens = np.array(rows)[:, :top_m]
    counts = [data.draw(st.integers(0, top_m)) for _ in rows]
    probabilities = np.array(
        [[0.1 + rank / 7 if rank < count else 0 for rank in range(top_m)] for count in counts]
    )
    sent = entries(tokens, probabilities)
    packed = pack_probs(sent)
    assert len(packed) == len(rows) + 8 * sum(counts)
    found = unpack_probs(packed, len(rows), top_m)
    for before, after, count in zip(sent, found, counts):
        assert after[:count].tolist() == before[:count].tolist()
        assert not (after[count:] >> 32).any()
        assert len(set((after & 0xFFFFFFFF).tolist())) == top_m


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x07" + bytes(56), b"\x01" + bytes(7)])
def test_damaged_distributions_are_refused(data):
    with pytest.raises(Malformed):
        unpack_probs(data, 1, 6)


def test_a_full_link_is_told_what_is_true_later():
    """Nobody is asked for changes as long as there is no room."""
    room, sent, asked = [False], [], []
    outbox = Outbox(lambda message: room[0] and not sent.append(message))

    def changes():
        asked.append(len(asked))
        return [State(1, 0, len(asked))]

    assert outbox.flush([changes])
    outbox.add(State(1, 0, 100))
    assert not outbox.flush([changes]) and len(asked) == 1 and not sent
    room[0] = True
    assert not outbox.flush([changes]) and len(asked) == 1
    assert outbox.flush([changes]) and len(asked) == 2
    told = [frame.state for message in sent for frame in decode_to_target(message)]
    assert told == [1, 100, 2]
    assert not Outbox(lambda message: True).flush()


def test_large_messages_are_divided(monkeypatch):
    monkeypatch.setattr("vllm_ssd.relay.outbox._AT_ONCE", 1000)
    sent = []
    outbox = Outbox(lambda message: not sent.append(message))
    frames_sent = [Grown(1, 0, 1, 0, bytes(300), b"") for _ in range(9)]
    outbox.add(*frames_sent)
    outbox.flush()
    assert len(sent) > 3 and max(map(len, sent)) < 1000
    assert [frame for message in sent for frame in decode_to_target(message)] == frames_sent
    assert msgspec.msgpack.decode(sent[0][2:])
