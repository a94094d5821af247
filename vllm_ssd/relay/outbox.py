"""What is to be sent over a link, as long as there is no room for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from vllm_ssd.relay.frames import LARGEST, Frame, encode

_AT_ONCE = LARGEST // 4  # bytes of a message, about, unless it is one frame


class Outbox:
    """``send``: returns False if there is no room for the message now."""

    def __init__(self, send: Callable[[bytes], bool]):
        self._send = send
        self._frames: list[Frame] = []
        self._messages: deque[bytes] = deque()

    def add(self, *frames: Frame) -> None:
        """To be sent with the next ``flush``."""
        self._frames += frames

    def flush(self, changes: Iterable[Callable[[], Sequence[Frame]]] = ()) -> bool:
        """Send what was added, and what has changed; returns whether there was something. As long
        as there is no room, nobody is asked for changes: they are told as they are later."""
        if self._messages:
            self._send_messages()
            return False
        for take in changes:
            self._frames += take()
        if not self._frames:
            return False
        self._messages.extend(_messages(self._frames))
        self._frames = []
        self._send_messages()
        return True

    def _send_messages(self) -> None:
        while self._messages and self._send(self._messages[0]):
            self._messages.popleft()


def _messages(frames: list[Frame]) -> list[bytes]:
    message = encode(frames)
    if len(message) <= _AT_ONCE or len(frames) == 1:
        return [message]
    half = len(frames) // 2
    return [*_messages(frames[:half]), *_messages(frames[half:])]
