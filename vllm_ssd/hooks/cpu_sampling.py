"""Corrects vLLM's rejection sampler on CPUs, so that every request has its own sampling settings.

vLLM 0.32's ``expand_kernel`` for CPUs fills a copy of its output and drops it (vLLM issue 55005).
In every step with a sampled request, the draft tokens' temperature, top-k and top-p are then
uninitialized memory. The greedy requests of that step get wrong text too. In a step without draft
tokens, ``apply_top_k_only`` takes the maximum of an empty tensor, which ends the engine.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ssd.hooks.patches import Original


def with_every_request_expanded(
    _: Original,
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens, as vLLM documents the function:
    x [batch] -> [num_tokens]. cu_num_tokens: int [batch], cumulative draft tokens."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


def with_empty_steps(original: Original, logits: torch.Tensor, *args: Any) -> torch.Tensor:
    return original(logits, *args) if len(logits) else logits
