"""The protocol between the two ends of a relay: typed frames in msgpack, several in a message.

A message begins with two bytes: the version of these frames and the version of the speculation
table. A list of frames follows, each an array that begins with the name of its type.

A connection has one *session* at a time: the time in which the draft serves the engine. Records
name the generation of their request, and no generation is in two sessions. So an end ignores what
arrives too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Union

import msgspec

from vllm_ssd.protocol import TableOwner, TableShape
from vllm_ssd.protocol.draft_names import CommonOptions
from vllm_ssd.protocol.messages import UNREADABLE, Add, Leave, Remove, Slot, Wake
from vllm_ssd.protocol.schema import VERSION as TABLE_VERSION

VERSION = 7
_VERSIONS = bytes((VERSION, TABLE_VERSION))
LARGEST = 16 * 2**20  # bytes of a message; a text of three million tokens fits

Unsigned = Annotated[int, msgspec.Meta(ge=0)]  # msgpack limits it to 64 bits
Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Malformed(ValueError):
    """A message or frame that breaks this protocol. The error's text is a sentence."""


class Frame(msgspec.Struct, tag=True, array_like=True):
    """Base class of all frames."""


class Changed(Frame):
    """A change of one record of the table, from the end whose side writes it. record: index of its
    kind in ``KINDS``. known: number of tokens sent before. head, tokens, probs: bytes of arrays
    that ``relay/records.py`` describes; numbers are int32 or float32, little-endian."""

    record: Unsigned
    slot: Slot
    stamp: Unsigned
    known: Count = 0
    head: bytes = b""
    tokens: bytes = b""
    probs: bytes = b""


# From the target's end


class Hello(Frame):
    """The first frame of a connection. Both sides have its service's keys."""


class Ping(Frame):
    """Asks for a ``Status``. sent_ns: sender's clock in nanoseconds. link_us: recent round trip in
    microseconds, 0 = not known yet."""

    sent_ns: Unsigned
    link_us: Unsigned


class Opening(Frame):
    """An engine's ``Join``: ends the session of that engine, on whichever connection, and begins
    another. engine: its run directory on the target's node. shape, owner: of its table."""

    engine: Name
    shape: TableShape
    owner: TableOwner

    def __post_init__(self) -> None:
        if not 1 <= self.shape.slots < 2**31:
            raise ValueError("a table without slots")
        if not 0 <= self.owner.engine < 2**32:
            raise ValueError("an engine without a place")


class Told(Frame):
    """Another control message of the engine. ``Leave`` ends the session, ``Wake`` needs none. The
    draft's end answers none of them: ``Status`` shows the result."""

    message: Union[Leave, Add, Remove, Wake]


class Plan(Frame):
    """Says whether the target works without drafts now."""

    undrafted: bool


# From the draft's end


class Welcome(Frame):
    """The answer to ``Hello``."""

    options: CommonOptions


class Refused(Frame):
    """Ends the connection. why: the reason, as a sentence."""

    why: str


class Status(Frame):
    """The answer to ``Ping``. service, engine: the draft's part of their tables, all counters in
    the table's order. In place of the heartbeat there are the nanoseconds since then, -1 = none.
    engine: empty between sessions. sent_ns: copied from the ``Ping``, 0 = it answers none."""

    service: list[Number]
    engine: list[Number] = []
    sent_ns: Unsigned = 0


class Joined(Frame):
    """The answer to ``Opening``, after a ``Status``. refusal: the reason as a sentence, "" = the
    draft has joined."""

    refusal: str


ToDraft = Union[Hello, Ping, Opening, Told, Changed, Plan]
ToTarget = Union[Welcome, Refused, Status, Joined, Changed]

_encoder = msgspec.msgpack.Encoder()
_to_draft = msgspec.msgpack.Decoder(list[ToDraft])
_to_target = msgspec.msgpack.Decoder(list[ToTarget])


def encode(frames: Sequence[Frame]) -> bytes:
    """The bytes of a message with these frames."""
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
    except UNREADABLE as error:
        raise Malformed(f"a message that cannot be read: {error}") from error
