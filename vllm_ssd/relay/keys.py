"""The keys of a relay, and the file in which both nodes have them.

A draft service has a pair of keys (CURVE, as ZeroMQ has it), and its engines share another one. A
user copies the file to the targets' nodes: whoever can read it may be an engine, or the draft.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import zmq

from vllm_ssd.protocol.own_file import open_own

Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]


class KeyFile(msgspec.Struct, frozen=True):
    """name: of the service; addresses: HOST:PORT where each of its drafts listens; clients: public
    keys that it accepts; client_secret: that of the first of these, the engines'. Keys are Z85."""

    name: str
    addresses: list[str]
    server_public: Key
    server_secret: Key
    clients: Annotated[list[Key], msgspec.Meta(min_length=1)]
    client_secret: Key


def new_pair() -> tuple[str, str]:
    """A public and a secret key."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def make_keys(name: str, addresses: list[str]) -> KeyFile:
    """New ones."""
    server_public, server_secret = new_pair()
    public, secret = new_pair()
    return KeyFile(name, addresses, server_public, server_secret, [public], secret)


def read_keys(path: Path) -> KeyFile:
    """``ValueError`` with a sentence if there are none, or if they are another user's or others can
    read them. The path may be a link, as those of Kubernetes' secrets are."""
    try:
        with open(open_own(path, follow_links=True), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise ValueError(
                    f"the key file {path} can be read by others (mode {mode & 0o777:o}): make it "
                    f"the owner's, as with 'chmod 600 {path}'"
                )
            return msgspec.json.decode(file.read(), type=KeyFile)
    except OSError as error:
        raise ValueError(
            f"the key file {path} cannot be read ({error.strerror}): copy it from the draft's "
            "node, where 'vllm-ssd draft' has it as --key-file"
        ) from error
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is no key file ({error}): copy it from the draft's node once more"
        ) from error


def write_keys(path: Path, keys: KeyFile) -> None:
    """In place of what is there, readable by the owner only; raises ``OSError``."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)))
    new.rename(path)


def prepare_keys(path: Path, name: str, address: str, drafts: int) -> None:
    """Make the key file unless it is there, with this address and the ports after it;
    ``ValueError`` with a sentence if that fails or if it is another service's."""
    addresses = addresses_of(address, drafts)
    try:
        if not path.exists():
            write_keys(path, make_keys(name, addresses))
            return
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


def addresses_of(address: str, count: int) -> list[str]:
    """HOST:PORT for each of ``count`` drafts: this one, and the ports after it, or any free ones if
    its port is 0; ``ValueError`` with a sentence if it is none."""
    endpoint_of(address)
    host, _, port = address.rpartition(":")
    each = [int(port) + place if int(port) else 0 for place in range(count)]
    addresses = [f"{host}:{number}" for number in each]
    endpoint_of(addresses[-1])
    return addresses


def endpoint_of(address: str) -> str:
    """ZeroMQ's address of HOST:PORT; ``ValueError`` with a sentence if that is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, as in 10.0.0.5:7400")
    if host in ("*", "0.0.0.0", "[::]"):
        raise ValueError(
            f"{address!r} is every address of this node: name the one at which the engines reach it"
        )
    return f"tcp://{address}"
