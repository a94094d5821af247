"""Where a draft service on another node is, and what its engines have in common with it."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_ssd.protocol.draft_names import DraftName
from vllm_ssd.relay.frames import Hello, Malformed, Refused, Welcome, decode_to_target, encode
from vllm_ssd.relay.keys import Contact, contacts_of, read_keys
from vllm_ssd.relay.link import TargetLink
from vllm_ssd.relay.sockets import Sockets

REACH_S = 5.0  # for its answer


class Where(msgspec.Struct, frozen=True):
    """name: of the service; key_file: the path of its keys."""

    name: str
    key_file: str


def where(options: Mapping[str, Any]) -> Where | None:
    """By the options of ``--speculative-config``; None: on this node. ``ValueError`` with a
    sentence if that cannot be."""
    key_file, name = (
        value if isinstance(value := options.get(option), str) else None
        for option in ("draft_server_key", "draft_server")
    )
    if key_file is None:
        return None
    if name is None:
        raise ValueError(
            "draft_server_key is about a draft server on another node: add its name as draft_server"
        )
    return Where(name, str(Path(key_file).absolute()))


def contacts(where: Where) -> list[Contact]:
    """How to reach each of its drafts; ``ValueError`` with a sentence if nobody knows."""
    keys = read_keys(Path(where.key_file))
    if keys.name != where.name:
        raise ValueError(
            f"{where.key_file} is the key file of the draft server {keys.name!r}, and draft_server "
            f"is {where.name!r}: correct one of them"
        )
    if not (keys.client_secret and keys.clients):
        raise ValueError(f"{where.key_file} has no keys for engines: name the one of --key-file")
    return contacts_of(keys)


@functools.lru_cache(maxsize=8)
def _described(where: Where) -> DraftName:
    return describe(contacts(where)[0], where.name)


def described(options: Mapping[str, Any]) -> DraftName | None:
    """What the service of these options has published; None if it is on this node. ``ValueError``
    with a sentence if it cannot be reached. vLLM makes a config several times: an answer is
    kept."""
    place = where(options)
    return None if place is None else _described(place)


def describe(contact: Contact, name: str) -> DraftName:
    """Ask it; ``ValueError`` with a sentence if it does not answer."""
    sockets = Sockets()
    messages: list[bytes] = []
    try:
        link = TargetLink(sockets, contact, messages.append)
        link.send(encode([Hello(name)]))
        deadline = time.monotonic() + REACH_S
        while not messages and time.monotonic() < deadline:
            sockets.wait(0.05)
            sockets.drain()
    finally:
        sockets.close()
    if not messages:
        raise ValueError(
            f"the draft server {name!r} does not answer at {contact.address}: see that 'vllm-ssd "
            "draft' runs there, that this node reaches the address, and that both have the same "
            "key file"
        )
    for frame in _frames(messages[0]):
        if isinstance(frame, Welcome):
            return DraftName(name, frame.options, frame.service)
        if isinstance(frame, Refused):
            raise ValueError(frame.why)
    raise ValueError(f"what answers at {contact.address} is no draft server")


def _frames(message: bytes) -> list[Any]:
    try:
        return decode_to_target(message)
    except Malformed as error:
        raise ValueError(str(error)) from error
