"""The model's last hidden states after each token that may be verified.

The logits after a token follow from its hidden state. The draft keeps the state when it shows the
model the token, in a branch or by a feed. So it can predict the outcomes of a round without showing
the model drafts that it has grown itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.spec import DraftPolicy


class HiddenStates:
    """memory: [rows, hidden]. A request has a seat as long as it has KV memory. Each seat has
    ``places`` rows for the text's end and the drafts being verified, and as many for each branch.
    The last ``places`` rows, from ``padding`` on, take what nothing reads."""

    def __init__(self, model: DraftModel, policy: DraftPolicy, seats: int):
        self.places = policy.k + 1
        self._seat_size = (1 + max(policy.branches, 1)) * self.places
        self.padding = seats * self._seat_size
        rows = self.padding + self.places
        self.memory = torch.empty(
            rows, model.hidden_size, dtype=model.attention.shape.dtype, device=model.device
        )

    def keep(self, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        """Put hidden states, [n, hidden], into int64 [n] rows."""
        self.memory.index_copy_(0, rows, hidden)

    def verified(self, seat: int, count: int) -> range:
        """Rows of a text's end and the drafts after it, the first ``count``."""
        return range(seat * self._seat_size, seat * self._seat_size + count)

    def branch(self, seat: int, branch: int, count: int) -> range:
        """Rows of a branch: its bonus and the drafts after it, the first ``count``."""
        first = seat * self._seat_size + (1 + branch) * self.places
        return range(first, first + count)

    def branches(self, seats: Sequence[int], count: int) -> NDArray[np.int64]:
        """int64 [len(seats), count]: the first row of each of a seat's first ``count`` branches;
        padding if the seat is below 0."""
        seat = np.array(seats)[:, None]
        rows = seat * self._seat_size + np.arange(1, 1 + count) * self.places
        return np.where(seat < 0, self.padding, rows)
