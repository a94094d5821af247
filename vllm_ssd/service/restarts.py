"""Decides whether a lost draft is restarted."""

from __future__ import annotations

import math
import time

PAUSE_S = 0.5  # to wait before a restart, which itself takes seconds
FORGIVEN_S = 60.0


class Restarts:
    """Counts restarts. most: consecutive restarts allowed. The count resets after ``FORGIVEN_S``
    seconds of service."""

    def __init__(self, most: int):
        self._most = self._left = most
        self._served_from = math.inf

    def served(self) -> None:
        """Record that the draft serves from now on."""
        self._served_from = time.monotonic()

    def again(self) -> bool:
        """Record a loss and return whether a restart follows."""
        if time.monotonic() - self._served_from >= FORGIVEN_S:
            self._left = self._most
        self._served_from = math.inf
        self._left -= 1
        return self._left >= 0
