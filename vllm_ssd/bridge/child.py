"""A bridge's process on the target's node, seen from the engine core that starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from pathlib import Path

import msgspec

from vllm_ssd.lifecycle.detached import start_detached

START_S, STOP_S = 60.0, 3.0  # timeouts for its start, in which it connects to Ray, and for its end


class Child:
    """A detached process ``python -m module``. ``start`` also replaces one that has ended. It says
    ``ready`` or ``failed``, and nothing more. word: what it says with that."""

    word = ""

    def __init__(self, module: str, spec: msgspec.Struct, folder: Path):
        """folder: the working directory."""
        self._module, self._spec, self._folder = module, spec, folder
        self._channel: socket.socket | None = None

    def start(self) -> None:
        """Start the child. Raises ``ValueError`` with a sentence if it is not ready within
        ``START_S`` seconds."""
        self.stop()
        try:
            self._channel, self._group = start_detached(self._module, self._folder, self._spec)
            self._channel.settimeout(START_S)
            line = self._channel.makefile("rb").readline()
            if not line.endswith(b"\n"):
                line = b'{"failed": "its bridge ended at its start, and the log above says why"}'
            ((kind, self.word),) = json.loads(line).items()
            self._channel.settimeout(None)
        except OSError as error:
            kind, self.word = "failed", f"its bridge could not be started ({error})"
        if kind != "ready":
            self.stop()
            raise ValueError(self.word)

    @property
    def ended(self) -> bool:
        """Whether no child runs: it has closed its side of the channel, on which it sends nothing
        more."""
        return self._channel is None or self._channel.fileno() < 0 or is_closed(self._channel)

    def stop(self) -> None:
        """End the child; kill it if it has not ended after ``STOP_S`` seconds."""
        if self._channel is None:
            return
        with contextlib.suppress(OSError):  # the child has ended by itself
            self._channel.shutdown(socket.SHUT_WR)
            self._channel.settimeout(STOP_S)
            try:
                self._channel.recv(1)
            except TimeoutError:
                os.killpg(self._group, signal.SIGKILL)
        self._channel.close()


def is_closed(channel: socket.socket) -> bool:
    """Whether the other side, which sends nothing more, has closed the channel."""
    try:
        return not channel.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
