"""How far the draft runs ahead of its device, and how long its work takes there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# Pieces of work in flight on a GPU: enough to keep it busy, and few enough that a new outcome waits
# for no more than one piece beside the one that runs.
_ON_GPU = 2


class InFlight:
    """``count(kind, amount, microseconds)`` is told of every piece of work when it is done.
    limit: pieces that may have been started and are not done."""

    def __init__(self, device: torch.device, count: Callable[[str, int, int], None]):
        self._on_gpu = device.type == "cuda"
        self.limit = _ON_GPU if self._on_gpu else 1
        self._count = count
        self._running: deque[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._done = 0.0

    def ready(self) -> bool:
        """Whether more work may be started."""
        while self._running and self._running[0][3].query():
            kind, amount, start, end = self._running.popleft()
            self._count(kind, amount, int(start.elapsed_time(end) * 1000))
            self._spare += (start, end)
            self._done = time.monotonic()
        return len(self._running) < self.limit

    def idle_s(self) -> float:
        """Seconds since the last piece was done, as far as ``ready`` has seen; 0 while one runs."""
        return 0.0 if self._running else time.monotonic() - self._done

    @contextmanager
    def timed(self, kind: str, amount: int = 1) -> Iterator[None]:
        """Around the start of a piece of work. amount: what to count it as."""
        if self._on_gpu:
            start, end = self._event(), self._event()
            start.record()
            yield
            end.record()
            self._running.append((kind, amount, start, end))
        else:
            started = time.monotonic_ns()
            yield
            self._count(kind, amount, (time.monotonic_ns() - started) // 1000)
            self._done = time.monotonic()

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
