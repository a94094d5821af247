"""How far the draft runs ahead of its device, and how long its work takes there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Pieces of work in flight on a GPU: enough to keep it busy. A new outcome waits for at most one
# piece more than the one that runs.
_MOST = 2
# Seconds. A piece that takes longer never ends: the longest one takes hundreds of times less. A GPU
# that hangs reports no error, so without a limit the host would wait for ever.
HANG_S = 20.0
_LOOK_S = 50e-6  # seconds between two looks at pieces that ``finish`` waits for


@dataclass(frozen=True)
class _Piece:
    """A piece of work. started: seconds of the monotonic clock, when the host had started all of
    it; start, end: on the GPU."""

    kind: str
    amount: int
    started: float
    start: torch.cuda.Event
    end: torch.cuda.Event


class InFlight:
    """Pieces of work that were started and are not done: none on a CPU. Calls ``count(kind, amount,
    microseconds)`` for every piece when it is done."""

    def __init__(self, device: torch.device, count: Callable[[str, int, int], None]):
        self._on_gpu = device.type == "cuda"
        self._count = count
        self._running: deque[_Piece] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._done = 0.0

    def ready(self) -> bool:
        """True if more work may be started; ``TimeoutError`` if the GPU hangs."""
        while self._running and self._running[0].end.query():
            piece = self._running.popleft()
            microseconds = int(piece.start.elapsed_time(piece.end) * 1000)
            self._count(piece.kind, piece.amount, microseconds)
            self._spare += (piece.start, piece.end)
            self._done = time.monotonic()
        if self._running and time.monotonic() - self._running[0].started > HANG_S:
            raise TimeoutError(f"the GPU hangs: a piece of work was not done within {HANG_S:g} s")
        return len(self._running) < _MOST

    def finish(self) -> None:
        """Wait until all pieces are done; ``TimeoutError`` if the GPU hangs."""
        while self._running:
            time.sleep(_LOOK_S)
            self.ready()

    def idle_s(self) -> float:
        """Seconds since the last piece was done, as far as ``ready`` has seen; 0 while one runs."""
        return 0.0 if self._running else time.monotonic() - self._done

    @contextmanager
    def timed(self, kind: str, amount: int = 1) -> Iterator[None]:
        """Measure the piece of work that is started in the context. amount: what to count it as."""
        if self._on_gpu:
            start, end = self._event(), self._event()
            start.record()
            yield
            end.record()
            self._running.append(_Piece(kind, amount, time.monotonic(), start, end))
        else:
            started = time.monotonic_ns()
            yield
            self._count(kind, amount, (time.monotonic_ns() - started) // 1000)
            self._done = time.monotonic()

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
