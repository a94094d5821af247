"""Finds a draft service on another node and asks which options it fixes for its engines."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ssd.protocol.draft_names import CommonOptions
from vllm_ssd.protocol.sockets import Sockets
from vllm_ssd.relay.frames import Hello, Malformed, Refused, Welcome, decode_to_target, encode
from vllm_ssd.relay.keys import read_keys
from vllm_ssd.relay.link import TargetLink

REACH_S = 5.0  # timeout of its answer


def described(options: Mapping[str, Any]) -> CommonOptions | None:
    """What the service that these options of ``--speculative-config`` name fixes for its engines;
    None if it is on this node. Raises ``ValueError`` with a sentence if it cannot be reached."""
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
    return _ask(name, Path(key_file).absolute())


@functools.lru_cache(maxsize=8)  # vLLM makes a config several times
def _ask(name: str, key_file: Path) -> CommonOptions:
    """Ask the first draft in the key file for the service's options. Raises ``ValueError`` with a
    sentence if it does not answer or refuses."""
    keys = read_keys(key_file, name)
    sockets = Sockets()
    messages: list[bytes] = []
    address = keys.addresses[0]
    try:
        link = TargetLink(sockets, keys, 0, messages.append)
        link.send(encode([Hello()]))
        deadline = time.monotonic() + REACH_S
        while not messages and time.monotonic() < deadline:
            sockets.wait(0.05)
            sockets.drain()
    finally:
        sockets.close()
    if not messages:
        raise ValueError(
            f"the draft server {name!r} does not answer at {address}: see that 'vllm-ssd "
            "draft' runs there, that this node reaches the address, and that both have the same "
            "key file"
        )
    try:
        match decode_to_target(messages[0]):
            case [Welcome(options)]:
                return options
            case [Refused(why)]:
                raise ValueError(why)
            case _:
                raise Malformed("neither a welcome nor a refusal")
    except Malformed as error:
        raise ValueError(f"the draft server {name!r} at {address} answers {error}") from error
