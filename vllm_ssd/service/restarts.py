"""Whether and when a draft that was lost is started again."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds before a first start in a row, and how often this is doubled. More would gain little: a
# start takes seconds itself.
FIRST_PAUSE_S, DOUBLINGS = 0.25, 4
FORGIVEN_S = 60.0


class Restarts:
    """most: starts in a row that may come to nothing. A draft that has served for ``FORGIVEN_S``
    makes up for all before it."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self._most = most
        self._clock = clock
        self._in_a_row = 0
        self._served_from: float | None = None

    def served(self) -> None:
        """The draft serves from now on."""
        self._served_from = self._clock()

    def pause(self) -> float | None:
        """The draft is lost: seconds until it is started again; None = never."""
        if self._served_from is not None and self._clock() - self._served_from >= FORGIVEN_S:
            self._in_a_row = 0
        self._served_from = None
        if self._in_a_row >= self._most:
            return None
        self._in_a_row += 1
        return FIRST_PAUSE_S * 2.0 ** min(self._in_a_row - 1, DOUBLINGS)
