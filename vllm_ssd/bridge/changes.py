"""What the two ends of a bridge tell each other about a table: typed structs in msgpack.

Changes name the generation of their request, and no generation is in two sessions. So an end
ignores what arrives too late.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec

from vllm_ssd.table.messages import UNREADABLE, Add, Remove, Slot
from vllm_ssd.table.schema import VERSION as TABLE_VERSION

# Of these structs and of the speculation table. Both ends must have the same.
VERSIONS = [9, TABLE_VERSION]

Unsigned = Annotated[int, msgspec.Meta(ge=0)]  # msgpack limits it to 64 bits
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class Malformed(ValueError):
    """A change that does not fit the table. The error's text is a sentence."""


class Changed(msgspec.Struct, tag=True, omit_defaults=True):
    """A change of one record of the table, from the end whose side writes it. record: index of its
    kind in ``KINDS``. known: number of tokens sent before. head, tokens, probs: bytes of arrays
    that ``records.py`` describes; numbers are int32 or float32, little-endian."""

    record: Unsigned
    slot: Slot
    stamp: Unsigned
    known: Count = 0
    head: bytes = b""
    tokens: bytes = b""
    probs: bytes = b""


class Plan(msgspec.Struct, tag=True, omit_defaults=True):
    """Says whether the target works without drafts now."""

    undrafted: bool


# The target's end passes its engine's control messages on, in their order among the changes.
Change = Union[Add, Remove, Changed, Plan]

encode = msgspec.msgpack.encode  # a list of changes as bytes, for a call of Ray
_decoder = msgspec.msgpack.Decoder(list[Change])


def decode(message: bytes) -> list[Change]:
    """The changes in the bytes of ``encode``; raises ``Malformed``."""
    try:
        return _decoder.decode(message)
    except UNREADABLE as error:
        raise Malformed(f"changes that cannot be read: {error}") from error
