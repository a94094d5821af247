"""Outcomes of the coming round, by numbers of branches for each accepted length.

An outcome is ``(accepted, bonus)``. After the glue the draft knows its own logits at every position
of ``[bonus, d_1 .. d_n]``. If the target accepts ``j`` drafts, the token that it samples next is
likely among the top tokens at position ``j``. It cannot be ``d_{j+1}``: a draft is rejected only if
the target finds it less likely than it was proposed. The target then samples from the excess of its
probabilities over the proposed ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Branches(NamedTuple):
    """The branches of a fan-out. lengths: the accepted lengths that have branches. For each branch,
    accepted: its accepted length; row: the index of this length in ``lengths``; ranks: the rank of
    its bonus among the tokens there, 0 = the likeliest token."""

    lengths: tuple[int, ...]
    accepted: tuple[int, ...]
    row: tuple[int, ...]
    ranks: tuple[int, ...]


@lru_cache(maxsize=8192)
def each_branch(fan_out: tuple[int, ...]) -> Branches:
    """The branches of a fan-out, ordered by accepted length, then rank."""
    lengths = tuple(length for length, count in enumerate(fan_out) if count)
    row = tuple(row for row, length in enumerate(lengths) for _ in range(fan_out[length]))
    ranks = tuple(rank for count in fan_out for rank in range(count))
    return Branches(lengths, tuple(lengths[index] for index in row), row, ranks)


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
