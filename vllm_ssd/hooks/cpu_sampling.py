"""vLLM's rejection sampler on CPUs, with every request's own sampling settings.

vLLM 0.32's ``expand_kernel`` for CPUs fills a copy of its output and forgets it (vLLM issue 55005).
Temperature, top-k and top-p of the drafts of a step are then whatever the memory held, and as one
request that samples is enough for that, the greedy ones beside it get wrong text, too. And where no
request of a step has drafts, ``apply_top_k_only`` looks for the largest of no numbers, which ends
the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def with_every_request_expanded(_: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return functools.partial(expand_batch_to_tokens)  # of our own, for functools.wraps to write on


def with_steps_without_drafts(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply_sampling_constraints(logits: torch.Tensor, *args: Any) -> torch.Tensor:
        return original(logits, *args) if len(logits) else logits

    return apply_sampling_constraints


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """What vLLM's function of this name says: each request's value, once for each of its drafts.
    cu_num_tokens: the drafts of all requests up to and including each."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
