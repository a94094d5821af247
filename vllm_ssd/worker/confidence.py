"""The chances of a row's draft tokens to be accepted, for vLLM's adaptive verification.

If the draft's largest probability at a token's place was p, the token's chance is 1 - c (1 - p),
with a number c that is learned. Of a token without p, the chance is the share of those of its kind
and position that the target accepted lately. Neither depends on which token was drawn: choosing by
that what to verify would change the distribution of sampled texts.
"""

from __future__ import annotations

import torch

from vllm_ssd.worker.confidence_kernels import GUESSED, KINDS, calibrate_kernel

# Chances while nothing is measured: the draft's tokens are worth trying, guesses rather not.
_DRAFT_PRIOR, _GUESS_PRIOR = 0.7, 0.2
_OVER_DOUBT = 0.5  # c while nothing is measured
_PRIOR_WEIGHT = 2.0  # draft tokens
# A grade's weight halves in 70 steps. A position that is no longer tried returns to the prior, so
# it is tried again.
_FADE = 0.99
# From this many rows on, the last step's draft tokens predict how many the next step will have.
# With fewer rows, chance decides which have some: each is expected to, so that there is room.
# (Verifying all draft tokens of fewer rows makes a step little longer.)
MANY_ROWS = 16


class Confidence:
    """Chances on the device. ``look_up_kernel`` explains ``grades``, ``doubts``, ``acceptance``,
    ``supply`` and ``typical``.

    ``current``: float32 [rows, k], for the draft tokens proposed last, in batch order.
    ``expected``: float32 [rows, k], for the step after the next one. vLLM chooses that step's
    number of draft tokens before they are known. rows: size of the largest batch.
    """

    def __init__(self, rows: int, k: int, device: torch.device):
        self.both = torch.zeros(2, rows, k, dtype=torch.float32, device=device)
        self.current, self.expected = self.both
        prior = torch.full((KINDS, k), _DRAFT_PRIOR, dtype=torch.float32, device=device)
        prior[GUESSED.value] = _GUESS_PRIOR
        self._prior = prior
        self.acceptance = prior.clone()
        self.supply = torch.zeros(k + 1, dtype=torch.float32, device=device)
        self.typical = torch.zeros(k, dtype=torch.float32, device=device)
        self.grades = torch.zeros(KINDS, k, 2, dtype=torch.float32, device=device)
        self.doubts = torch.tensor([0.0, 0.0, _OVER_DOUBT], device=device)

    def calibrate(self) -> None:
        """Enqueue the update of the chances after a graded step."""
        cells = self._prior.numel()
        calibrate_kernel[(1,)](
            self.grades,
            self._prior,
            self.acceptance,
            self.doubts,
            self.supply,
            self.typical,
            _FADE,
            _PRIOR_WEIGHT,
            _OVER_DOUBT,
            len(self.typical),
            cells,
            1 << (cells - 1).bit_length(),
            num_warps=1,
        )
