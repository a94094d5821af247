"""The chances of a row's draft tokens to be accepted, for vLLM's adaptive verification.

The draft's doubt about a token is 1 less its largest probability at the token's place. A share c of
the doubts comes true, so the token's chance is 1 - c * doubt. Guesses are of full doubt. c is
measured for each source of tokens.

No chance depends on which token was drawn: choosing by that what to verify would change the
distribution of sampled texts.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ssd.worker.confidence_kernels import SOURCES, calibrate_kernel

# c of the draft, of a guess's first token and of its other tokens while nothing is measured: the
# draft's tokens are worth trying, guesses rather not.
_PRIOR = (0.5, 0.8, 0.8)
_ACCEPTED = 0.7  # chance of a first draft token while nothing is measured
_PRIOR_WEIGHT = 2.0  # doubts, or first draft tokens
# A count's weight halves in 70 steps. A source that is no longer tried returns to the prior, so it
# is tried again.
_FADE = 0.99
# From this many rows on, the last step's draft tokens predict how many the next step will have.
# With fewer rows, chance decides which have some: each is expected to, so that there is room.
# (Verifying all draft tokens of fewer rows makes a step little longer.)
MANY_ROWS = 16


class Confidence:
    """Chances on the device. ``look_up_kernel`` explains ``doubts``, ``shares``, ``first``,
    ``supply`` and ``usual``.

    ``current``: float32 [rows, k], for the draft tokens proposed last, in batch order.
    ``expected``: float32 [rows, k], for the step after the next one. vLLM chooses that step's
    number of draft tokens before they are known. rows: size of the largest batch.
    """

    def __init__(self, rows: int, k: int, device: torch.device):
        # Explicitly: vLLM may have another default type.
        of: Any = {"dtype": torch.float32, "device": device}
        self.both = torch.zeros(2, rows, k, **of)
        self.current, self.expected = self.both
        self._prior = torch.tensor(_PRIOR, **of)
        self.doubts = torch.zeros(SOURCES, 2, **of)
        self.shares = self._prior.clone()
        self.first = torch.zeros(2, **of)
        self.supply = torch.zeros(k + 1, **of)
        self.usual = torch.full((k + 1,), _ACCEPTED, **of)
        self._lanes = 1 << max(k, SOURCES - 1).bit_length()

    def calibrate(self) -> None:
        """Enqueue the update of the chances after a graded step."""
        calibrate_kernel[(1,)](
            self.doubts,
            self._prior,
            self.shares,
            self.first,
            self.supply,
            self.usual,
            _FADE,
            _PRIOR_WEIGHT,
            _ACCEPTED,
            SOURCES,
            len(self.usual) - 1,
            self._lanes,
            num_warps=1,
        )
