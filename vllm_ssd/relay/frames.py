"""What the two ends of a relay tell each other: typed frames, msgpack, several in a message.

A message begins with two bytes, the versions of these frames and of the speculation table; then
comes a list of frames, each an array that begins with the name of its type. A *session* is the time
for which the draft drafts for one engine, between two losses of the link at most; whatever carries
the number of another session is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Union

import msgspec

from vllm_ssd.protocol import TableOwner, TableShape
from vllm_ssd.protocol.messages import Add, Join, Leave, Remove, Slot, Wake
from vllm_ssd.protocol.schema import VERSION as TABLE_VERSION

VERSION = 5
_VERSIONS = bytes((VERSION, TABLE_VERSION))
LARGEST = 16 * 2**20  # bytes of a message; a text of three million tokens fits

Session = Annotated[int, msgspec.Meta(ge=0)]  # 0 = the service itself
Stamp = Annotated[int, msgspec.Meta(ge=0)]  # of 64 bits, as msgpack has no more
Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Malformed(ValueError):
    """A message, or a frame of it, that is not one of these. The message is a sentence."""


class Frame(msgspec.Struct, tag=True, array_like=True):
    """Base of all."""


class Changed(Frame):
    """Something new of a record of the table, from the end whose side writes it. record: its kind,
    as a place in ``KINDS``; ``relay/records.py`` says what is in the arrays: int32, little-endian.
    known: tokens that were told before."""

    session: Session
    record: Annotated[int, msgspec.Meta(ge=0)]
    slot: Slot
    stamp: Stamp
    known: Count = 0
    head: bytes = b""
    tokens: bytes = b""
    probs: bytes = b""


class Plan(Frame):
    """Whether the target does without drafts now."""

    session: Session
    undrafted: bool


# From the target's end


class Hello(Frame):
    """The first frame of a connection. name: of the draft service that is looked for."""

    name: Name


class Ping(Frame):
    """Answered with a ``Pong`` and a ``Status`` of everything. sent_ns: the sender's clock.
    link_us: microseconds that messages took there and back lately, 0 = not known yet."""

    sent_ns: Annotated[int, msgspec.Meta(ge=0)]
    link_us: Annotated[int, msgspec.Meta(ge=0)]


class Told(Frame):
    """A control message of an engine's, or to the service itself. ``Join`` begins a session, in
    place of an earlier one of the same engine, and ``Leave`` ends one; these are about run
    directories on the target's node. ``Join`` is answered with ``Joined``, what comes of the others
    a ``Status`` shows. shape, owner: of the table of the engine that joins."""

    session: Session
    message: Union[Join, Leave, Add, Remove, Wake]
    shape: Union[TableShape, None] = None
    owner: Union[TableOwner, None] = None

    def __post_init__(self) -> None:
        if self.shape is not None and not 1 <= self.shape.slots < 2**31:
            raise ValueError("a table without slots")
        if self.owner is not None and not 0 <= self.owner.engine < 2**32:
            raise ValueError("an engine without a place")


# From the draft's end


class Welcome(Frame):
    """The answer to ``Hello``. options: what all engines have in common with the service; service:
    which one it is."""

    options: dict[str, Any]
    service: Name


class Refused(Frame):
    """The connection is over: why, as a sentence."""

    why: str


class Pong(Frame):
    """sent_ns: of the ``Ping``."""

    sent_ns: Number


class Joined(Frame):
    """refusal: "", or why the draft does not draft for this engine, as a sentence."""

    session: Session
    refusal: str


class Status(Frame):
    """The draft's part of a table. age_ns: nanoseconds since the heartbeat, -1 = there is none;
    counters: all fields in their order, the heartbeat too."""

    session: Session
    age_ns: Annotated[int, msgspec.Meta(ge=-1)]
    counters: list[Number]


ToDraft = Union[Hello, Ping, Told, Changed, Plan]
ToTarget = Union[Welcome, Refused, Pong, Joined, Status, Changed]

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
