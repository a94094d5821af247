"""How likely the drafts of a row are to be accepted: what vLLM's adaptive verification asks for.

A draft's chance is the share of drafts of its kind (``kinds.py``) and position that were accepted
lately. It depends on where drafts come from and how many there are, never on which tokens they are:
a choice of what is verified by the tokens drawn would change the distribution of sampled texts.
"""

from __future__ import annotations

import torch

from vllm_ssd.worker.confidence_kernels import calibrate_kernel
from vllm_ssd.worker.kinds import FROM_SIBLING, GUESSED, KINDS

# What is worth trying as long as nothing is known: drafts, and guesses rather not.
_DRAFT_PRIOR, _GUESS_PRIOR = 0.7, 0.2
_PRIOR_WEIGHT = 2.0  # drafts
# A grade is worth half after 70 steps. A position that is no longer tried goes back to the prior,
# and so is tried again.
_FADE = 0.99
# From this many rows on, the last step's drafts say how many the next step will have. Which of
# fewer rows will have some is chance: then each is expected to, so that there is room for them.
# (A step that verifies all drafts of fewer rows takes little longer than one without any.)
MANY_ROWS = 16


class Confidence:
    """On the device: ``grades``, ``acceptance``, ``supply`` and ``typical`` as kernels have them.
    Of the drafts proposed last, ``current`` float32 [rows, k], in batch order; and ``expected``,
    the same for the number of drafts of the step after the next one, which is chosen before that
    step's drafts are known.

    rows: of the largest batch.
    """

    def __init__(self, rows: int, k: int, device: torch.device):
        self.both = torch.zeros(2, rows, k, dtype=torch.float32, device=device)
        self.current, self.expected = self.both
        prior = torch.full((KINDS, k), _DRAFT_PRIOR, dtype=torch.float32, device=device)
        prior[[FROM_SIBLING, GUESSED]] = _GUESS_PRIOR
        self._prior = prior
        self.acceptance = prior.clone()
        self.supply = torch.zeros(k + 1, dtype=torch.float32, device=device)
        self.typical = torch.zeros(k, dtype=torch.float32, device=device)
        self.grades = torch.zeros(KINDS, k, 2, dtype=torch.float32, device=device)

    def calibrate(self) -> None:
        """Enqueue what follows a step that was graded."""
        cells = self._prior.numel()
        calibrate_kernel[(1,)](
            self.grades,
            self._prior,
            self.acceptance,
            self.supply,
            self.typical,
            _FADE,
            _PRIOR_WEIGHT,
            len(self.typical),
            cells,
            1 << (cells - 1).bit_length(),
            num_warps=1,
        )
