"""How much time a round of the draft has while one target verifies.

Every target has its own: verifications of a small one are over sooner than those of a large one.
"""

from __future__ import annotations

import math
from collections import defaultdict

# Weight of the newest duration of a verification.
_NEWEST = 0.1
# The part of a verification's duration that a round of the draft may take: its bounds, and how it
# changes with a round whose branches were complete, and with one whose were not.
_LEAST_SHARE, _MOST_SHARE, _COMPLETE, _INCOMPLETE = 0.25, 2.0, 0.005, -0.045


class Window:
    """Of one target."""

    def __init__(self) -> None:
        self._verification_us = 0.0  # 0 = none has been seen
        self._shares: defaultdict[int, float] = defaultdict(lambda: 1.0)  # by requests of a batch

    def us(self, requests: int) -> float:
        """Microseconds that a round of a batch of ``requests`` requests may take; infinity as long
        as no verification has been seen."""
        return self._verification_us * self._shares[requests] or math.inf

    def verified(self, took_us: float) -> None:
        """A verification is over, this number of microseconds after the target had decided on its
        drafts."""
        if self._verification_us:
            # A step that did more than verify (a prompt, a pause) says little about the next.
            took_us = min(took_us, 2 * self._verification_us)
            self._verification_us += _NEWEST * (took_us - self._verification_us)
        else:
            self._verification_us = took_us

    def taken(self, requests: int, complete: bool) -> None:
        """The target has taken the branch of one of ``requests`` requests of a batch. complete:
        with all its tokens."""
        share = self._shares[requests] + (_COMPLETE if complete else _INCOMPLETE) / requests
        self._shares[requests] = min(max(share, _LEAST_SHARE), _MOST_SHARE)
