"""A process that is one end of a relay, and the one that started it.

They have a socket pair. The parent tells a line of JSON, the child's spec; the child says one,
``["ready", text]`` or ``["failed", text]``, and ends with the socket, however the parent ends.
``vllm serve`` kills its engine core and all children of it without giving them time: so the child
detaches itself, and puts everything away.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vllm_ssd.lifecycle.launch import absolute_paths
from vllm_ssd.relay.connection import End
from vllm_ssd.relay.sockets import Sockets

STOP_S = 3.0  # for the child to end by itself
Spec = TypeVar("Spec", bound=msgspec.Struct)


class Child:
    """``word``: what it said first."""

    def __init__(self, module: str, spec: msgspec.Struct, folder: Path, start_s: float):
        """Start ``python -m module`` in a folder; ``ValueError`` with its sentence if it does not
        come up within ``start_s`` seconds."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            # In a folder of ours, as Python imports what is in the working directory first.
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                cwd=folder,
                env=os.environ | absolute_paths(os.environ),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for who started it
            )
        try:
            self._channel.settimeout(start_s)
            self._channel.sendall(msgspec.json.encode(spec) + b"\n")
            line = self._channel.makefile("rb").readline()
            kind, self.word = json.loads(line or b'["failed", "it ended at its start"]')
        except OSError as error:
            kind, self.word = "failed", f"it did not start ({error})"
        if kind != "ready":
            self.stop()
            raise ValueError(self.word)
        self._channel.settimeout(None)
        self._process.wait()  # it has detached itself from this one

    @property
    def ended(self) -> bool:
        """Whether it has closed its end of the channel, on which it says nothing more."""
        if self._channel.fileno() < 0:
            return True
        try:
            return not self._channel.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def stop(self) -> None:
        """Have it end, and see that it does."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._channel.shutdown(socket.SHUT_WR)
            self._channel.settimeout(STOP_S)
            try:
                self._channel.recv(1)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)  # in which it has stayed
        self._channel.close()
        self._process.wait()


def run(
    channel_fd: str,
    kind: type[Spec],
    make: Callable[[Spec, Sockets], End[Any]],
    afterwards: Callable[[Spec], None] = lambda _: None,
) -> None:
    """What a process does that ``Child`` has started, to which this is the channel: detach itself,
    and work until the parent has closed its end."""
    if os.fork():
        os._exit(0)
    channel, sockets, gone = socket.socket(fileno=int(channel_fd)), Sockets(), False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # an order to put things away, too
    spec = msgspec.json.decode(channel.makefile("rb").readline(), type=kind)

    def close() -> None:
        """The parent tells nothing more: what can be read is the end."""
        nonlocal gone
        sockets.remove(channel.fileno())
        gone = True

    def say(*words: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            channel.sendall(json.dumps(words).encode() + b"\n")

    sockets.add(channel.fileno(), close)
    try:
        end = make(spec, sockets)
    except (OSError, RuntimeError, ValueError) as error:
        say("failed", str(error))
        sockets.close()
        return
    say("ready", end.word)
    try:
        while not (end.ended or gone):
            end.step()
    finally:
        end.close()
        afterwards(spec)
