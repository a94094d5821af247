"""vLLM's rejection sampler on CPUs, with every request's own sampling settings.

vLLM 0.32's ``expand_kernel`` for CPUs fills a copy of its output and forgets it (vLLM issue 55005).
Temperature, top-k and top-p of the drafts of a step are then whatever the memory held, and as one
request that samples is enough for that, the greedy ones beside it get wrong text, too.
"""

from __future__ import annotations

from functools import partial

import torch

from vllm_ssd.patching import patch


def repair_sampling() -> None:
    """Have this process's rejection sampler use our ``expand_batch_to_tokens``."""
    from vllm.v1.sample import rejection_sampler

    patch(rejection_sampler, "expand_batch_to_tokens", lambda _: partial(expand_batch_to_tokens))


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
