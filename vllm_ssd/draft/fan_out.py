"""Outcomes of the coming round, by numbers of branches for each accepted length.

An outcome is ``(accepted, bonus)``. After the glue the draft knows its own logits at every position
of ``[bonus, d_1 .. d_n]``. If the target accepts ``j`` drafts, the token that it samples next is
likely among the top tokens at position ``j``. It cannot be ``d_{j+1}``: a draft is rejected only if
the target finds it less likely than it was proposed. The target then samples from the excess of its
probabilities over the proposed ones.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class FanOuts:
    """The branches of several requests, equally many of each, ordered by accepted length, then
    rank. counts: int64 [requests, k + 1], the branches of each accepted length; lengths: the same
    shape, the accepted lengths that have branches, then 0. For each branch, int64 [requests,
    branches], accepted: its accepted length; row: where this is in ``lengths``; ranks: the rank of
    its bonus among the tokens there, 0 = the likeliest token."""

    def __init__(self, counts: NDArray[np.int64]):
        requests, places = counts.shape
        each = np.repeat(np.arange(counts.size) % places, counts.ravel())
        self.counts, self.accepted = counts, each.reshape(requests, -1)
        request = np.arange(requests)[:, None]
        own = request, self.accepted
        self.row = (counts > 0).cumsum(axis=1)[own] - 1
        self.lengths = np.zeros_like(counts)
        self.lengths[request, self.row] = self.accepted
        before = counts.cumsum(axis=1) - counts
        self.ranks = np.arange(self.accepted.shape[1]) - before[own]


def choose(
    logits: torch.Tensor,
    ruled_out: torch.Tensor,
    source: torch.Tensor,
    rank: torch.Tensor,
    ranks: int,
) -> torch.Tensor:
    """Predicted bonus tokens, int64 [branches].

    logits: [rows, vocab], changed in place; ruled_out: int64 [rows], the draft that follows each
    row, or -1; source: int64 [branches], each branch's row; rank: int64 [branches], 0 = the row's
    likeliest token; ranks: greater than every rank. Ranks beyond the vocabulary count as its last.
    """
    # A draft beyond the vocabulary comes from a damaged table: it may rule out any token.
    index = ruled_out.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    drafted = logits.gather(1, index)
    hidden = drafted.masked_fill(ruled_out.unsqueeze(1) >= 0, float("-inf"))
    logits.scatter_(1, index, hidden)
    widest = min(ranks, logits.shape[1])
    top = logits.topk(widest, dim=-1).indices
    return top[source, rank.clamp(max=widest - 1)]
