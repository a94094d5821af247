"""What the two ends of a relay tell each other: typed frames, msgpack, several in a message.

A message begins with two bytes, the versions of these frames and of the speculation table; then
comes a list of frames, each an array that begins with the name of its type. Arrays of numbers are
bytes, little-endian. A *session* is the time for which the draft drafts for one engine, between
two losses of the link at most; whatever carries the number of another session is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_ssd.service.messages import Generation, Seed, Slot
from vllm_ssd.table.schema import VERSION as TABLE_VERSION

VERSION = 3
_VERSIONS = bytes((VERSION, TABLE_VERSION))
LARGEST = 16 * 2**20  # bytes of a message; a text of a million tokens has 4 MiB

Session = Annotated[int, msgspec.Meta(ge=1)]
Stamp = Annotated[int, msgspec.Meta(ge=0)]  # of 64 bits, as msgpack has no more
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Malformed(ValueError):
    """A message, or a frame of it, that is not one of these. The message is a sentence."""


class Frame(msgspec.Struct, tag=True, array_like=True):
    """Base of all."""


# From the target's end


class Hello(Frame):
    """The first frame of a connection. name: of the draft service that is looked for."""

    name: Name


class Ping(Frame):
    """Answered with a ``Pong`` and a ``Status`` of everything. sent_ns: the sender's clock.
    link_us: microseconds that messages took there and back lately, 0 = not known yet."""

    sent_ns: Annotated[int, msgspec.Meta(ge=0)]
    link_us: Annotated[int, msgspec.Meta(ge=0)]


class Open(Frame):
    """Draft for an engine, in place of an earlier session with the same name. Answered with
    ``Opened``. engine: what tells it from all other engines; the rest is of its table and owner."""

    session: Session
    engine: Name
    slots: Annotated[int, msgspec.Meta(ge=1, le=2**14)]
    k: Annotated[int, msgspec.Meta(ge=1, le=64)]
    branches: Annotated[int, msgspec.Meta(ge=1, le=2**12)]
    tail: Annotated[int, msgspec.Meta(ge=2, le=2**16)]
    top_m: Annotated[int, msgspec.Meta(ge=0, lt=2**8)]
    model: Name
    index: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Close(Frame):
    """Draft for it no longer. asleep: as in the control message ``Leave``."""

    session: Session
    asleep: bool = False


class Woken(Frame):
    """As the control message ``Wake``; a ``Status`` shows what comes of it."""


class Added(Frame):
    """As the control message ``Add``. tokens: int32."""

    session: Session
    slot: Slot
    generation: Generation
    tokens: bytes
    temperature: float
    seed: Seed


class Removed(Frame):
    """As the control message ``Remove``."""

    session: Session
    slot: Slot
    generation: Generation


class Happened(Frame):
    """An outcome. length: tokens of the text, of which ``tokens``, int32, are the last, and were
    not told before; accepted: -1 if they are of several rounds."""

    session: Session
    slot: Slot
    stamp: Stamp
    length: Count
    accepted: Annotated[int, msgspec.Meta(ge=-1, le=64)]
    tokens: bytes


class Confirmed(Frame):
    """The drafts, int32, that are verified in the round after this outcome."""

    session: Session
    slot: Slot
    stamp: Stamp
    drafts: bytes


class Plan(Frame):
    """undrafted: as in the table."""

    session: Session
    undrafted: Annotated[int, msgspec.Meta(ge=0, le=1)]


# From the draft's end


class Welcome(Frame):
    """The answer to ``Hello``. options: what all engines have in common with the service; service:
    which one it is."""

    options: dict[str, Any]
    service: Name


class Refused(Frame):
    """The other one: why, as a sentence."""

    why: str


class Pong(Frame):
    """sent_ns: of the ``Ping``."""

    sent_ns: int


class Opened(Frame):
    """refusal: "", or why the draft does not draft for this engine, as a sentence."""

    session: Session
    refusal: str


class Status(Frame):
    """The draft's part of a table. session: 0 = of the service's own one. age_ns: nanoseconds since
    the heartbeat, -1 = there is none; counters: all fields in their order, the heartbeat too."""

    session: Annotated[int, msgspec.Meta(ge=0)]
    age_ns: Annotated[int, msgspec.Meta(ge=-1)]
    counters: list[int]


class State(Frame):
    """The draft's state for a slot's request, as it is stored."""

    session: Session
    slot: Slot
    state: Stamp


class Predicted(Frame):
    """Outcomes that are predicted. accepted, bonus: int32 [branches] each; steps: as in the table.
    Their branches have no tokens yet."""

    session: Session
    slot: Slot
    stamp: Stamp
    steps: Count
    accepted: bytes
    bonus: bytes


class Grown(Frame):
    """More tokens for all branches of a prediction, after the ``known`` that each has. tokens:
    int32 [new, branches]; probs: as of ``pack_probs`` for each of the tokens."""

    session: Session
    slot: Slot
    stamp: Stamp
    known: Count
    tokens: bytes
    probs: bytes


class Fallback(Frame):
    """More tokens, int32 [new], for an outcome that was not predicted, after the ``known`` ones."""

    session: Session
    slot: Slot
    stamp: Stamp
    known: Count
    tokens: bytes
    probs: bytes


ToDraft = Union[Hello, Ping, Open, Close, Woken, Added, Removed, Happened, Confirmed, Plan]
ToTarget = Union[Welcome, Refused, Pong, Opened, Status, State, Predicted, Grown, Fallback]

_encoder = msgspec.msgpack.Encoder()
_to_draft = msgspec.msgpack.Decoder(list[ToDraft])
_to_target = msgspec.msgpack.Decoder(list[ToTarget])


def encode(frames: Sequence[Frame]) -> bytes:
    """A message."""
    return _VERSIONS + _encoder.encode(frames)


def decode_to_draft(message: bytes) -> list[ToDraft]:
    """The frames of a message to the draft's end; raises ``Malformed``."""
    return _decode(message, _to_draft)


def decode_to_target(message: bytes) -> list[ToTarget]:
    """The frames of a message to the target's end; raises ``Malformed``."""
    return _decode(message, _to_target)


def _decode(message: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if message[:2] != _VERSIONS:
        raise Malformed(
            f"the other end of the relay speaks version {tuple(message[:2])} and this one "
            f"{tuple(_VERSIONS)}: install the same vllm-ssd on both nodes"
        )
    if len(message) > LARGEST:
        raise Malformed(f"a message of {len(message)} bytes, and the most are {LARGEST}")
    try:
        return decoder.decode(memoryview(message)[2:])
    except msgspec.DecodeError as error:
        raise Malformed(f"a message that cannot be read: {error}") from error


def int32s(data: bytes, most: int) -> NDArray[np.int32]:
    """The numbers in these bytes, ``most`` at most; raises ``Malformed``."""
    if len(data) % 4 or len(data) > 4 * most:
        raise Malformed(f"{len(data)} bytes where {most} numbers of 4 bytes are the most")
    return np.frombuffer(data, "<i4")


def pack_probs(draft_probs: NDArray[np.int64]) -> bytes:
    """Entries int64 [rows, top_m], without those that have no mass: for each row their number in a
    byte, then all of them."""
    massive = (draft_probs >> 32) != 0
    counts = massive.sum(-1).astype("u1")
    return counts.tobytes() + draft_probs[massive].tobytes()


def unpack_probs(data: bytes, rows: int, top_m: int) -> NDArray[np.int64]:
    """Entries int64 [rows, top_m] from those with mass, which come first in each row; the others
    have tokens that are not in the row, as those of a distribution differ. Raises ``Malformed``."""
    counts = np.frombuffer(data[:rows], "u1")
    entries = data[rows:]
    if len(counts) != rows or (counts > top_m).any() or len(entries) != 8 * int(counts.sum()):
        raise Malformed(f"{len(data)} bytes are not the distributions of {rows} drafts")
    rank = np.arange(top_m)
    listed = rank < counts[:, None]
    found = np.zeros((rows, top_m), np.int64)
    found[listed] = np.frombuffer(entries, "<i8")
    if not listed.all():
        found[~listed] = _others(found, listed)[~listed]
    return found


def _others(found: NDArray[np.int64], listed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64 [rows, top_m]: tokens that are not listed in the row, each once. Of 2 * top_m tokens
    at least half are not."""
    rows, top_m = found.shape
    tokens = found & 0xFFFFFFFF
    row, rank = np.nonzero(listed & (tokens < 2 * top_m))
    present = np.zeros((rows, 2 * top_m), bool)
    present[row, tokens[row, rank]] = True
    return np.argsort(present, axis=1, kind="stable")[:, :top_m].astype(np.int64)
