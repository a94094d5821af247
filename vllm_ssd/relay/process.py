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
from pathlib import Path
from typing import TypeVar

import msgspec

from vllm_ssd.relay.sockets import Sockets
from vllm_ssd.service.launch import absolute_paths

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


def detach() -> None:
    """To be called first of all by a process that ``Child`` starts."""
    if os.fork():
        os._exit(0)


class Parent:
    """The other side. gone: it has closed its end."""

    def __init__(self, channel_fd: int, sockets: Sockets):
        self._channel = socket.socket(fileno=channel_fd)
        self._sockets = sockets
        self.gone = False
        # An order to put things away, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def told(self, spec: type[Spec]) -> Spec:
        """What the parent has told; to be asked once."""
        text = self._channel.makefile("rb").readline()
        self._sockets.add(self._channel.fileno(), self._close)
        return msgspec.json.decode(text, type=spec)

    def say(self, kind: str, text: str) -> None:
        """ "ready" or "failed"; to be said once."""
        try:
            self._channel.sendall(json.dumps([kind, text]).encode() + b"\n")
        except BrokenPipeError:
            self.gone = True

    def _close(self) -> None:
        """It tells nothing more: what can be read is the end."""
        self._sockets.remove(self._channel.fileno())
        self.gone = True
