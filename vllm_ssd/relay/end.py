"""One end of a relay: a process, what it does again and again, and what it has of the other end.

A process that is an end has a socket pair with the one that started it. The parent tells a line of
JSON, the child's spec; the child says one, ``["ready", text]`` or ``["failed", text]``, and ends
with the socket, however the parent ends. ``vllm serve`` kills its engine core and all children of
it without giving them time: so the child detaches itself, and puts everything away.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from vllm_ssd.lifecycle.launch import absolute_paths
from vllm_ssd.relay.frames import LARGEST, Frame, encode
from vllm_ssd.relay.mirror import Mirror
from vllm_ssd.relay.sockets import Sockets

_AT_ONCE = LARGEST // 4  # bytes of a message, about, unless it is one frame
LOOK_S = 0.1  # between two looks at who is gone, and two questions how the draft is
REST_S = 0.05  # between two looks without any request, when news come by messages only
_FINEST_S, _COARSEST_S = 100e-6, 1e-3
_LOOKS = 10  # in the time there and back
START_S, STOP_S = 30.0, 3.0  # for a child to start, and to end by itself

Spec = TypeVar("Spec", bound=msgspec.Struct)


class Connection:
    """mirror: of the engine's table in its session, None between two of them. heard: when something
    last came from the other end, -infinity = it is gone. link_us: microseconds that a message takes
    there and back, 0 = not known yet."""

    def __init__(self, send: Callable[[bytes], bool]):
        """``send``: returns False if there is no room for the message now; ``ConnectionError`` if
        the other end is gone."""
        self._send = send
        self._frames: list[Frame] = []
        self._messages: deque[bytes] = deque()
        self.mirror: Mirror | None = None
        self.heard = time.monotonic()
        self.link_us = 0.0

    def add(self, *frames: Frame) -> None:
        """To be sent with the next ``flush``."""
        self._frames += frames

    def flush(self) -> None:
        """Send what was added, and what has changed. As long as there is no room nobody looks for
        changes: they are told as they are later."""
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
            self.heard = -math.inf

    def mirror_of(self, session: int) -> Mirror | None:
        """The mirror, unless the session is over."""
        mirror = self.mirror
        return mirror if mirror is not None and mirror.session == session else None

    @property
    def pause_s(self) -> float:
        """Seconds until the next look at its tables. More looks would bring news little earlier,
        and take time of a core, which on CPUs target or draft want."""
        if self.mirror is None or not self.mirror.has_requests:
            return REST_S
        return min(max(self.link_us * 1e-6 / _LOOKS, _FINEST_S), _COARSEST_S)


C = TypeVar("C", bound=Connection)


class End(Generic[C]):
    """``step`` until ``ended``; then ``close``. word: what the process that started it is told."""

    word: str
    ended = False

    def __init__(self, sockets: Sockets):
        self._sockets = sockets
        self._next_look = 0.0
        self._peers: dict[bytes, C] = {}  # by their names to the link

    def step(self) -> None:
        """One look at everything, and a pause."""
        self._sockets.drain()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look_after(now)
        for peer in self._peers.values():
            peer.flush()
        self._sockets.wait(min((peer.pause_s for peer in self._peers.values()), default=REST_S))

    def close(self) -> None:
        """Leave nothing behind."""
        raise NotImplementedError

    def _look_after(self, now: float) -> None:
        """Every ``LOOK_S`` seconds: see who is gone."""
        raise NotImplementedError


def _messages(frames: Sequence[Frame]) -> list[bytes]:
    message = encode(frames)
    if len(message) <= _AT_ONCE or len(frames) == 1:
        return [message]
    half = len(frames) // 2
    return [*_messages(frames[:half]), *_messages(frames[half:])]


class Child:
    """``word``: what it said first."""

    def __init__(self, module: str, spec: msgspec.Struct, folder: Path):
        """Start ``python -m module`` in a folder; ``ValueError`` with its sentence if it does not
        come up within ``START_S`` seconds."""
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
            self._channel.settimeout(START_S)
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
        return self._channel.fileno() < 0 or _is_closed(self._channel)

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


def _is_closed(channel: socket.socket) -> bool:
    """Whether the other side has closed it, who says nothing more."""
    try:
        return not channel.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def run(
    kind: type[Spec],
    make: Callable[[Spec, Sockets], End[Any]],
    afterwards: Callable[[Spec], None] = lambda _: None,
) -> None:
    """What a process does that ``Child`` has started: detach itself, and work until the parent has
    closed its end of the channel."""
    if os.fork():
        os._exit(0)
    channel, sockets = socket.socket(fileno=int(sys.argv[1])), Sockets()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # an order to put things away, too
    spec = msgspec.json.decode(channel.makefile("rb").readline(), type=kind)

    def say(*words: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            channel.sendall(json.dumps(words).encode() + b"\n")

    try:
        end = make(spec, sockets)
    except (OSError, RuntimeError, ValueError) as error:
        say("failed", str(error))
        sockets.close()
        return
    say("ready", end.word)
    try:
        while not (end.ended or _is_closed(channel)):
            end.step()
    finally:
        end.close()
        afterwards(spec)
