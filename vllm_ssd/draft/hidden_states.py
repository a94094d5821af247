"""What the draft remembers of each branch: its newest token, its random numbers, and the model's
last hidden states.

The logits after a token follow from its hidden state. The draft keeps the state when it shows the
model the token, in a branch or by a feed. So it can predict the outcomes of a round without showing
the model drafts that it has grown itself.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.spec import DraftPolicy


class HiddenStates:
    """memory: [rows, hidden]; newest: int64 [homes]. A request has a seat as long as it has KV
    memory. Each seat has a home for its text, then ``homes``: int64 [seats, branches]. A home has
    ``places`` rows of memory, for the text's end or a branch's bonus and for the drafts after it,
    and a newest token. The last home, ``padding``, takes what nothing reads. uniforms: float64
    [seats, branches, k], a random number in [0, 1) for every draft that is sampled."""

    def __init__(self, model: DraftModel, policy: DraftPolicy, seats: int):
        self.places = policy.k + 1
        self._homes = 1 + max(policy.branches, 1)  # of a seat
        self.padding = seats * self._homes
        self.homes = np.arange(self.padding).reshape(seats, self._homes)[:, 1:]
        self.uniforms = np.zeros((*self.homes.shape, policy.k))
        self.padding_row = self.padding * self.places
        self.memory = torch.empty(
            (self.padding + 1) * self.places,
            model.hidden_size,
            dtype=model.attention.shape.dtype,
            device=model.device,
        )
        self.newest = torch.zeros(self.padding + 1, dtype=torch.int64, device=model.device)

    def verified(self, seat: int, count: int) -> range:
        """Rows of a text's end and the drafts after it, the first ``count``."""
        first = seat * self._homes * self.places
        return range(first, first + count)

    def branch(self, seat: int, branch: int, count: int) -> range:
        """Rows of a branch: its bonus and the drafts after it, the first ``count``."""
        first = int(self.homes[seat, branch]) * self.places
        return range(first, first + count)
