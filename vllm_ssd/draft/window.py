"""How much time a round of the draft has while one target verifies.

Every target has a window of its own: a small target verifies in less time than a large one.
"""

from __future__ import annotations

import math
from collections import defaultdict

# Weight of the newest duration of a verification.
_NEWEST = 0.1
# The share of a verification's duration that a draft round may take: its bounds, and its change
# after a round with complete branches, and after one with incomplete ones. With more than 1, each
# wait of the target would make rounds longer, and longer rounds make more waits.
_LEAST_SHARE, _MOST_SHARE, _COMPLETE, _INCOMPLETE = 0.25, 1.0, 0.005, -0.045


class Window:
    """Time budget of one draft round in microseconds, learned from the target's recent verification
    times."""

    def __init__(self) -> None:
        self._verification_us = 0.0  # 0 = none has been seen
        self._shares: defaultdict[int, float] = defaultdict(lambda: 1.0)  # by requests of a batch

    def us(self, requests: int) -> float:
        """Microseconds that a round of a batch of ``requests`` requests may take; infinity before
        the first verification."""
        return self._verification_us * self._shares[requests] or math.inf

    def verified(self, took_us: float) -> None:
        """Take in a verification that ended ``took_us`` microseconds after the target had decided
        on its drafts."""
        if self._verification_us:
            # A step that did more than verify (a prompt, a pause) says little about the next.
            took_us = min(took_us, 2 * self._verification_us)
            self._verification_us += _NEWEST * (took_us - self._verification_us)
        else:
            self._verification_us = took_us

    def taken(self, requests: int, complete: bool) -> None:
        """Take in that the target took the branch of one of ``requests`` requests of a batch.
        complete: the branch had all its tokens."""
        share = self._shares[requests] + (_COMPLETE if complete else _INCOMPLETE) / requests
        self._shares[requests] = min(max(share, _LEAST_SHARE), _MOST_SHARE)
