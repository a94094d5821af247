"""Another node on this machine: a network namespace, reached over virtual interfaces."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """namespace: its name, also that of the interface on this side. here, there: the addresses of
    both nodes."""

    namespace: str
    here: str
    there: str

    def command(self, *words: str) -> list[str]:
        """What runs this command there."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut(self) -> None:
        """Nothing arrives any more, in either direction."""
        _ip("link", "set", self.namespace, "down")

    def mend(self) -> None:
        _ip("link", "set", self.namespace, "up")


def why_not() -> str:
    """Why this machine and user cannot have another node; "" if they can."""
    if os.geteuid():
        return "only root makes network namespaces"
    try:
        with another_node() as node:
            _run(node.command("true"))
    except FileNotFoundError as error:
        return f"there is no {error.filename}, of iproute2"
    except subprocess.CalledProcessError as error:
        return f"another node cannot be made here: {error.stderr.strip()}"
    return ""


@contextmanager
def another_node() -> Iterator[Node]:
    """Gone at the end, once what runs there has ended."""
    number = os.getpid()
    subnet = f"10.{200 + number % 50}.{number // 50 % 250}"
    node = Node(f"ssd{number}", f"{subnet}.1", f"{subnet}.2")
    _ip("netns", "add", node.namespace)
    try:
        _connect(node)
        yield node
    finally:
        with suppress(subprocess.CalledProcessError):  # they may not have been connected
            _ip("link", "delete", node.namespace)
        _ip("netns", "delete", node.namespace)


def _connect(node: Node) -> None:
    name, inside = node.namespace, "eth0"
    for words in (
        ("link", "add", name, "type", "veth", "peer", "name", inside, "netns", name),
        ("address", "add", f"{node.here}/24", "dev", name),
        ("link", "set", name, "up"),
        ("-n", name, "address", "add", f"{node.there}/24", "dev", inside),
        ("-n", name, "link", "set", inside, "up"),
        ("-n", name, "link", "set", "lo", "up"),
    ):
        _ip(*words)


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
