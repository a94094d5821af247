"""One end of a relay: its process, its work loop, and its connections to other ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from vllm_ssd.lifecycle.detached import detach, say, start_detached
from vllm_ssd.protocol.sockets import Sockets
from vllm_ssd.relay.frames import LARGEST, Frame, encode
from vllm_ssd.relay.mirror import Mirror

_AT_ONCE = LARGEST // 4  # most bytes of a message, except one that is a single frame
TEND_S = 0.1  # between two checks for peers that are gone, and two pings
REST_S = 0.05  # between two steps without requests, when only messages bring changes
_FINEST_S, _COARSEST_S = 100e-6, 1e-3
_STEPS = 10  # steps in one round trip of the link
START_S, STOP_S = 30.0, 3.0  # timeouts for a child's start and for its end

Spec = TypeVar("Spec", bound=msgspec.Struct)


class Connection:
    """The connection to the other end. mirror: mirror of the engine's table, None between sessions.
    silent_s: seconds without a message from the other end, infinite = it is gone. Pauses of this
    process do not count: nothing is asked and nothing is read in them. link_us: round trip of a
    message in microseconds, 0 = not known yet."""

    def __init__(self, send: Callable[[bytes], bool]):
        """send: sends a message; returns False if there is no room for it now, and raises
        ``ConnectionError`` if the other end is gone."""
        self._send = send
        self._frames: list[Frame] = []
        self._messages: deque[bytes] = deque()
        self.mirror: Mirror | None = None
        self.silent_s = 0.0
        self.link_us = 0.0

    def add(self, *frames: Frame) -> None:
        """Queue frames for the next ``flush``."""
        self._frames += frames

    def flush(self) -> None:
        """Send queued frames and changes of the mirror. While there is no room, the mirror is not
        read: intermediate updates are skipped, and the current state is sent later."""
        if not self._messages:
            if self.mirror is not None:
                self._frames += self.mirror.take()
            if self._frames:
                self._messages.extend(_messages(self._frames))
                self._frames = []
        try:
            while self._messages and self._send(self._messages[0]):
                self._messages.popleft()
        except ConnectionError:
            self.silent_s = math.inf

    @property
    def pause_s(self) -> float:
        """Seconds until the next step. Shorter pauses would bring changes hardly earlier, and use
        time of a core that target or draft need on CPUs."""
        if self.mirror is None or not self.mirror.has_requests:
            return REST_S
        return min(max(self.link_us * 1e-6 / _STEPS, _FINEST_S), _COARSEST_S)


C = TypeVar("C", bound=Connection)


class End(Generic[C]):
    """The work loop of an end: call ``step`` until ``ended``, then ``close``. word: the text that
    the parent gets once this end is ready."""

    word: str
    ended = False

    def __init__(self, sockets: Sockets):
        self._sockets = sockets
        self._next_tend = 0.0
        self._peers: dict[bytes, C] = {}  # by the link's name for each

    def step(self) -> None:
        """Read messages, check the peers, send changes, then wait for messages or the next step."""
        self._sockets.drain()
        now = time.monotonic()
        if now >= self._next_tend:
            self._next_tend = now + TEND_S
            for peer in self._peers.values():
                peer.silent_s += TEND_S
            self._tend(now)
        for peer in self._peers.values():
            peer.flush()
        self._sockets.wait(min((peer.pause_s for peer in self._peers.values()), default=REST_S))

    def close(self) -> None:
        """Close all connections and remove all files of this end."""
        raise NotImplementedError

    def _tend(self, now: float) -> None:
        """Check every ``TEND_S`` seconds which processes are gone."""
        raise NotImplementedError


def _messages(frames: Sequence[Frame]) -> list[bytes]:
    message = encode(frames)
    if len(message) <= _AT_ONCE or len(frames) == 1:
        return [message]
    half = len(frames) // 2
    return [*_messages(frames[:half]), *_messages(frames[half:])]


class Child:
    """A detached process ``python -m module`` that is an end, seen from its parent. ``start`` also
    replaces one that has ended. It says ``ready`` or ``failed``, and nothing more. word: what it
    says with that."""

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
                line = b'{"failed": "its relay ended at its start, and the log above says why"}'
            ((kind, self.word),) = json.loads(line).items()
            self._channel.settimeout(None)
        except OSError as error:
            kind, self.word = "failed", f"its relay could not be started ({error})"
        if kind != "ready":
            self.stop()
            raise ValueError(self.word)

    @property
    def ended(self) -> bool:
        """Whether no child runs: it has closed its side of the channel, on which it sends nothing
        more."""
        return self._channel is None or self._channel.fileno() < 0 or _is_closed(self._channel)

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


def _is_closed(channel: socket.socket) -> bool:
    """Whether the other side, which sends nothing more, has closed the channel."""
    try:
        return not channel.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def run(kind: type[Spec], make: Callable[[Spec, Sockets], End[Any]]) -> None:
    """Run an end in a process that ``Child`` has started, until the parent closes its side of the
    channel. kind: type of the spec. make: makes the end, ``OSError``, ``RuntimeError`` or
    ``ValueError`` if that fails."""
    channel, spec = detach(kind)
    sockets = Sockets()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # reaches ``finally`` below

    try:
        end = make(spec, sockets)
    except (OSError, RuntimeError, ValueError) as error:
        say(channel, "failed", str(error))
        sockets.close()
        return
    say(channel, "ready", end.word)
    try:
        while not (end.ended or _is_closed(channel)):
            end.step()
    finally:
        end.close()
