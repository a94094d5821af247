"""The distribution that a drafted token was sampled from: a few tokens with their probabilities.

An *entry* is one 8-byte word, the token (int32) in its lower half and its probability (float32) in
its upper half, so that tables, kernels and broadcasts move whole entries. A distribution has
``top_m`` of them; their tokens differ and their probabilities add up to 1. A token proposed with
certainty is each of its entries, with probability 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_HALVES = np.dtype([("token", "<i4"), ("probability", "<f4")])
ONE = 0x3F800000 << 32  # probability 1 as the upper half of an entry


def pack(tokens: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """int [..], float32 [..] of one shape -> entries, int64 [..]."""
    halves = torch.stack((tokens.int(), probabilities.view(torch.int32)), dim=-1)
    return halves.view(torch.int64).squeeze(-1)


def unpack(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries, int64 [..] -> tokens int64 [..], probabilities float32 [..]."""
    halves = entries.unsqueeze(-1).view(torch.int32)
    return halves[..., 0].long(), halves[..., 1].view(torch.float32)


def certain(tokens: torch.Tensor, top_m: int) -> torch.Tensor:
    """Entries int64 [.., top_m] of tokens int64 [..] that are proposed with certainty."""
    return (tokens | ONE).unsqueeze(-1).expand(*tokens.shape, top_m)


def are_sound(entries: NDArray[np.int64], vocab_size: int) -> bool:
    """Whether all are tokens of the vocabulary and probabilities; damage is not."""
    halves = entries.view(_HALVES)
    tokens, probabilities = halves["token"], halves["probability"]
    known = (tokens >= 0) & (tokens < vocab_size)
    return bool((known & (probabilities >= 0) & (probabilities <= 1)).all())
