"""What the model said after each token that may be verified: its last hidden states.

The logits after a token follow from its hidden state. It is kept when the model is shown the token,
in a branch or by a feed, so that the outcomes of a round can be predicted without showing the model
drafts that it has grown itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.spec import DraftPolicy


class HiddenStates:
    """memory: [rows, hidden]. For each seat, which a request has as long as it has KV memory,
    there are ``places`` rows for the text's end and the drafts being verified, and as many for each
    branch; at the end, from ``padding`` on, as many for what nobody needs."""

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
        """Rows of a text's end and the drafts after it: the first ``count``."""
        return range(seat * self._seat_size, seat * self._seat_size + count)

    def branch(self, seat: int, branch: int, count: int) -> range:
        """Rows of a branch: its bonus and the drafts after it, the first ``count``."""
        first = seat * self._seat_size + (1 + branch) * self.places
        return range(first, first + count)

    def branches(self, seat: int, count: int) -> Sequence[int]:
        """The first row of each of a seat's first ``count`` branches; below 0, of nobody's."""
        if seat < 0:
            return [self.padding] * count
        first = seat * self._seat_size + self.places
        return range(first, first + count * self.places, self.places)
