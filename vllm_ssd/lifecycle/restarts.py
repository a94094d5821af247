"""Decides whether and when a lost draft is restarted."""

from __future__ import annotations

import time
from collections.abc import Callable

# Pause before the first consecutive restart in seconds, and how often it doubles at most. A longer
# pause would gain little: a start itself takes seconds.
FIRST_PAUSE_S, DOUBLINGS = 0.25, 4
FORGIVEN_S = 60.0


class Restarts:
    """Counts restarts. most: consecutive restarts allowed. The count resets after ``FORGIVEN_S``
    seconds of service."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self._most = most
        self._clock = clock
        self._in_a_row = 0
        self._served_from: float | None = None

    def served(self) -> None:
        """Record that the draft serves from now on."""
        self._served_from = self._clock()

    def pause(self) -> float | None:
        """Record a loss and return the seconds to wait before the restart; None = no restart."""
        if self._served_from is not None and self._clock() - self._served_from >= FORGIVEN_S:
            self._in_a_row = 0
        self._served_from = None
        if self._in_a_row >= self._most:
            return None
        self._in_a_row += 1
        return FIRST_PAUSE_S * 2.0 ** min(self._in_a_row - 1, DOUBLINGS)
