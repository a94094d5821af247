"""Whether and when a draft that was lost is restarted."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds before the first restart in a row, and the most times they are doubled. A longer pause
# would gain little, as a start takes seconds itself.
FIRST_PAUSE_S, DOUBLINGS = 0.25, 4
FORGIVEN_S = 60.0


class Restarts:
    """most: restarts in a row, counted from 0 again once a draft has served for ``FORGIVEN_S``
    seconds."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self._most = most
        self._clock = clock
        self._in_a_row = 0
        self._served_from: float | None = None

    def served(self) -> None:
        """The draft serves from now on."""
        self._served_from = self._clock()

    def pause(self) -> float | None:
        """The draft is lost: seconds until it is to be restarted, None = never."""
        if self._served_from is not None and self._clock() - self._served_from >= FORGIVEN_S:
            self._in_a_row = 0
        self._served_from = None
        if self._in_a_row >= self._most:
            return None
        self._in_a_row += 1
        return FIRST_PAUSE_S * 2.0 ** min(self._in_a_row - 1, DOUBLINGS)
