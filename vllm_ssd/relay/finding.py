"""Where a draft service on another node is, and what its engines have in common with it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_ssd.relay.frames import Hello, Malformed, Refused, Welcome, decode_to_target, encode
from vllm_ssd.relay.keys import Contact, contact_of, new_pair, read_keys
from vllm_ssd.relay.link import TargetLink
from vllm_ssd.relay.sockets import Sockets
from vllm_ssd.service.draft_names import DraftName

REACH_S = 5.0  # for its answer
RAY_S = 60.0  # for Ray's


class Where(msgspec.Struct, frozen=True):
    """name: of the service; then a path to its key file, or the address of the Ray cluster that
    runs it, and a pair of this process's keys for that."""

    name: str
    key_file: str | None = None
    ray_address: str | None = None
    public: str = ""
    secret: str = ""


def where(options: Mapping[str, Any]) -> Where | None:
    """By the options of ``--speculative-config``; None: on this node. ``ValueError`` with a
    sentence if that cannot be."""
    key_file, ray_address, name = (
        value if isinstance(value := options.get(option), str) else None
        for option in ("draft_server_key", "ray_address", "draft_server")
    )
    if key_file is None and ray_address is None:
        return None
    if key_file is not None and ray_address is not None:
        raise ValueError(
            "draft_server_key and ray_address are two ways to one draft server: leave one out"
        )
    if name is None:
        given = "ray_address" if key_file is None else "draft_server_key"
        raise ValueError(
            f"{given} is about a draft server on another node: add its name as draft_server"
        )
    if key_file is not None:
        return Where(name, key_file=str(Path(key_file).absolute()))
    public, secret = _own_pair()
    return Where(name, ray_address=ray_address, public=public, secret=secret)


_own_pair = functools.cache(new_pair)


def contact(where: Where) -> Contact:
    """How to reach it; ``ValueError`` with a sentence if nobody knows."""
    if where.key_file is None:
        return _ask_ray(where)
    keys = read_keys(Path(where.key_file))
    if keys.name != where.name:
        raise ValueError(
            f"{where.key_file} is the key file of the draft server {keys.name!r}, and draft_server "
            f"is {where.name!r}: correct one of them"
        )
    if not keys.client_secret:
        raise ValueError(f"{where.key_file} has no keys for engines: name the one of --key-file")
    return contact_of(keys)


@functools.lru_cache(maxsize=8)
def _described(where: Where) -> DraftName:
    return describe(contact(where), where.name)


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
            return DraftName(name, frame.options)
        if isinstance(frame, Refused):
            raise ValueError(frame.why)
    raise ValueError(f"what answers at {contact.address} is no draft server")


def _frames(message: bytes) -> list[Any]:
    try:
        return decode_to_target(message)
    except Malformed as error:
        raise ValueError(str(error)) from error


def _ask_ray(where: Where) -> Contact:
    """In a process of its own: Ray brings threads, signal handlers and exit hooks."""
    command = [sys.executable, "-m", "vllm_ssd.relay.ray_names"]
    try:
        done = subprocess.run(
            [*command, str(where.ray_address), where.name, where.public],
            capture_output=True,
            text=True,
            timeout=RAY_S,
            check=False,
        )
        said = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"the Ray cluster at {where.ray_address!r} did not answer within {RAY_S:g} s: correct "
            "ray_address"
        ) from None
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"Ray could not be asked for {where.name!r}: {last}") from None
    if "refused" in said:
        raise ValueError(said["refused"])
    return Contact(said["address"], said["server_public"], where.public, where.secret)
