"""One end of a relay, and what it has of the other end: the engine whose table both mirror, and
what is to be sent as long as there is no room for it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from vllm_ssd.relay.frames import LARGEST, Frame, encode
from vllm_ssd.relay.mirror import Mirror
from vllm_ssd.relay.sockets import Sockets

_AT_ONCE = LARGEST // 4  # bytes of a message, about, unless it is one frame
LOOK_S = 0.1  # between two looks at who is gone, and two questions how the draft is
REST_S = 0.05  # between two looks without any request, when news come by messages only
_FINEST_S, _COARSEST_S = 100e-6, 1e-3
_LOOKS = 10  # in the time there and back


class Mirrored(Protocol):
    """An engine with a table on this node."""

    mirror: Mirror


E = TypeVar("E", bound=Mirrored)


class Connection(Generic[E]):
    """engine: in its session, None between two of them. heard: when something last came from the
    other end, -infinity = it is gone. link_us: microseconds that a message takes there and back,
    0 = not known yet."""

    def __init__(self, send: Callable[[bytes], bool]):
        """``send``: returns False if there is no room for the message now; ``ConnectionError`` if
        the other end is gone."""
        self._send = send
        self._frames: list[Frame] = []
        self._messages: deque[bytes] = deque()
        self.engine: E | None = None
        self.heard = time.monotonic()
        self.link_us = 0.0

    def add(self, *frames: Frame) -> None:
        """To be sent with the next ``flush``."""
        self._frames += frames

    def flush(self) -> None:
        """Send what was added, and what has changed. As long as there is no room nobody looks for
        changes: they are told as they are later."""
        if not self._messages:
            if self.engine is not None:
                self._frames += self.engine.mirror.take()
            if self._frames:
                self._messages.extend(_messages(self._frames))
                self._frames = []
        try:
            while self._messages and self._send(self._messages[0]):
                self._messages.popleft()
        except ConnectionError:
            self.heard = -math.inf

    def engine_of(self, session: int) -> E | None:
        """The engine, unless the session is over."""
        engine = self.engine
        return engine if engine is not None and engine.mirror.session == session else None

    @property
    def pause_s(self) -> float:
        """Seconds until the next look at its tables. More looks would bring news little earlier,
        and take time of a core, which on CPUs target or draft want."""
        if self.engine is None or not self.engine.mirror.has_requests:
            return REST_S
        return min(max(self.link_us * 1e-6 / _LOOKS, _FINEST_S), _COARSEST_S)


class End(Generic[E]):
    """``step`` until ``ended``; then ``close``. word: what the process that started it is told."""

    word: str
    ended = False

    def __init__(self, sockets: Sockets):
        self._sockets = sockets
        self._next_look = 0.0
        self._peers: dict[bytes, Connection[E]] = {}  # by their names to the link

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
