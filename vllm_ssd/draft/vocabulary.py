"""Lets a draft with another vocabulary speak the target's token ids.

The rest of the draft knows the target's ids only. They become the draft's where the model reads
tokens, and its logits become those of the target's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SharedVocabulary:
    """The tokens that target and draft share, on the draft's device.

    draft_ids: for each token of the target, the draft's id for the same text. If the draft has no
    such token, it is ``~id``: the draft reads ``id`` in its place, and never proposes it.
    """

    def __init__(self, draft_ids: Sequence[int], device: torch.device):
        ids = torch.tensor(draft_ids, dtype=torch.int64, device=device)
        self._not_shared = ids < 0
        self._ids = torch.where(self._not_shared, ~ids, ids)

    def read(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids -> the ids that the model reads. A number that is no token of the target
        is read as its token 0."""
        known = (token_ids >= 0) & (token_ids < len(self._ids))
        return self._ids[torch.where(known, token_ids, 0)]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, the draft's tokens] -> [n, the target's tokens], minus infinity if not shared. So any
        probabilities made from them add up to 1 over the shared tokens."""
        return logits.index_select(1, self._ids).masked_fill_(self._not_shared, float("-inf"))
