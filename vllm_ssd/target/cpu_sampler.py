"""A repair of vLLM's rejection sampler on CPUs, without which sampled texts are wrong.

vLLM 0.32 and 0.33 hand every verified token its request's temperature, top-k and top-p through a
C++ kernel for int64. The stand-in that calls it (``_expand_kernel_impl``) converts its arguments,
the result's memory too, and drops the converted copy: what comes back was never written. It
concerns every speculative method; greedy requests in a batch of their own are spared.
"""

from __future__ import annotations

import torch


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """x: [batch]; cu_num_tokens: int [batch], sums of each request's tokens -> [num_tokens]: each
    request's value for each of its tokens, ``replace_to`` for ``replace_from``."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    value = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return value.repeat_interleave(counts, output_size=num_tokens)


def repair() -> None:
    """Have vLLM's rejection sampler use the function above."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
