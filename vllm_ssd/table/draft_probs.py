"""The distribution that a draft token was sampled from: a few tokens with their probabilities.

An *entry* is one 8-byte word: the token (int32) in its lower half, its probability (float32) in its
upper half. So tables, kernels and broadcasts move whole entries. A distribution has ``top_m``
entries; their tokens differ and their probabilities add up to 1. Outside the table, a token
proposed with certainty may also fill all its entries, each with probability 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a bridge works without torch
    import torch

_HALVES = np.dtype([("token", "<i4"), ("probability", "<f4")])
ONE = 0x3F800000 << 32  # probability 1 as the upper half of an entry
TOLERANCE = 1e-4  # how far a sum of probabilities may be from 1; float32 rounds by less


def pack(tokens: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Tokens int [..], probabilities float32 [..] of the same shape -> entries int64 [..]."""
    import torch

    halves = torch.stack((tokens.int(), probabilities.view(torch.int32)), dim=-1)
    return halves.view(torch.int64).squeeze(-1)


def unpack(draft_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries int64 [..] -> tokens int64 [..], probabilities float32 [..]."""
    import torch

    halves = draft_probs.unsqueeze(-1).view(torch.int32)
    return halves[..., 0].long(), halves[..., 1].view(torch.float32)


def are_sound(tokens: Sequence[int], draft_probs: NDArray[np.int64], vocab_size: int) -> bool:
    """True if drafts can have been sampled from ``draft_probs``, int64 [len(tokens), top_m].

    Damaged probabilities that still pass add up to 1 within ``TOLERANCE``.
    """
    if not draft_probs.shape[-1]:
        return True  # drafts are certain and have no distributions
    halves = draft_probs.view(_HALVES).reshape(draft_probs.shape)
    known = (halves["token"] >= 0) & (halves["token"] < vocab_size)
    probability = halves["probability"]
    whole = np.abs(probability.sum(-1) - 1) <= TOLERANCE
    listed = (halves["token"] == np.reshape(tokens, (-1, 1))) & (probability > 0)
    return bool((known & (probability >= 0)).all() and whole.all() and listed.any(-1).all())
