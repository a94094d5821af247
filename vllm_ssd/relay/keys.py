"""The keys of a relay, and the key file that both nodes have.

A draft service has one key pair (ZeroMQ's CURVE), and its engines share another. The user copies
the file to the targets' nodes. A process that can read it can act as an engine or as the draft.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import zmq

from vllm_ssd.protocol.messages import UNREADABLE
from vllm_ssd.protocol.own_file import open_own

Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]


class KeyFile(msgspec.Struct, frozen=True):
    """Content of a key file; keys are in Z85. name: the service. addresses: HOST:PORT of each
    draft. clients: accepted public keys, first the engines'. client_secret: their secret key."""

    name: str
    addresses: list[str]
    server_public: Key
    server_secret: Key
    clients: Annotated[list[Key], msgspec.Meta(min_length=1)]
    client_secret: Key


def new_pair() -> tuple[str, str]:
    """A new key pair: public key, secret key, both in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def make_keys(name: str, addresses: list[str]) -> KeyFile:
    """New keys for a service with this name and these addresses."""
    server_public, server_secret = new_pair()
    public, secret = new_pair()
    return KeyFile(name, addresses, server_public, server_secret, [public], secret)


def read_keys(path: Path, name: str | None = None) -> KeyFile:
    """Read the key file of the draft server with this name, None = any. Raises ``ValueError`` with
    a sentence if it is unreadable or another one's, belongs to another user or others can read it.
    Follows links: Kubernetes mounts secrets as links."""
    try:
        with open(open_own(path, follow_links=True), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise ValueError(
                    f"the key file {path} can be read by others (mode {mode & 0o777:o}): make it "
                    f"the owner's, as with 'chmod 600 {path}'"
                )
            keys = msgspec.json.decode(file.read(), type=KeyFile)
    except OSError as error:
        raise ValueError(
            f"the key file {path} cannot be read ({error.strerror}): copy it from the draft's "
            "node, where 'vllm-ssd draft' has it as --key-file"
        ) from error
    except UNREADABLE as error:
        raise ValueError(
            f"{path} is no key file ({error}): copy it from the draft's node once more"
        ) from error
    if name not in (None, keys.name):
        raise ValueError(
            f"{path} is the key file of the draft server {keys.name!r}, and not of {name!r}: use "
            "that name, or another key file"
        )
    return keys


def write_keys(path: Path, keys: KeyFile) -> None:
    """Write or replace a key file that only its owner can read; raises ``OSError``."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)))
    new.rename(path)


def prepare_keys(path: Path, name: str, address: str, drafts: int) -> KeyFile:
    """Read the key file, or make it, with ``address`` and the ports after it. Raises ``ValueError``
    with a sentence if that fails, or if it has another name or other addresses."""
    addresses = addresses_of(address, drafts)
    try:
        if not path.exists():
            write_keys(path, make_keys(name, addresses))
        keys = read_keys(path)
        if (keys.name, keys.addresses) != (name, addresses):
            raise ValueError(
                f"{path} is the key file of {keys.name!r} at {', '.join(keys.addresses)}: name "
                "another file, or remove this one and copy the new one to the engines' nodes"
            )
    except OSError as error:
        raise ValueError(
            f"the key file {path} cannot be written ({error.strerror}): name one in a folder of "
            "this user's"
        ) from error
    return keys


def addresses_of(address: str, count: int) -> list[str]:
    """HOST:PORT for each of ``count`` drafts: ``address`` and the ports after it. Port 0 gives port
    0, any free port, to each draft. Raises ``ValueError`` with a sentence if one is invalid."""
    endpoint_of(address)
    host, _, port = address.rpartition(":")
    each = [int(port) + place if int(port) else 0 for place in range(count)]
    addresses = [f"{host}:{number}" for number in each]
    endpoint_of(addresses[-1])
    return addresses


def endpoint_of(address: str) -> str:
    """ZeroMQ's address for HOST:PORT; ``ValueError`` with a sentence if that is invalid."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, as in 10.0.0.5:7400")
    if host in ("*", "0.0.0.0", "[::]"):
        raise ValueError(
            f"{address!r} is every address of this node: name the one at which the engines reach it"
        )
    return f"tcp://{address}"
