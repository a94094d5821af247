"""Measures the costs of a verification step: its tokens, and the reading of its requests' KV, once
for all draft tokens of a request.

In vLLM's own profile, each token is a request with 8192 tokens of KV. So a draft token seems to
cost several times what it does. The profile also runs steps of up to 8192 tokens five times, which
takes a tenth of a server's start. This module measures tokens without KV, and KV by itself. It runs
fewer steps, and only every second one of the CUDA graphs for many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import StepTimingSample

# Steps measured of each size without KV, and tokens of the longest such step. Arithmetic limits
# that one, so the costs of longer steps follow from it and the one before.
STEPS, _LONGEST = 3, 2048
# Tokens up to which each CUDA graph is measured. Beyond, neighbours cost nearly the same.
_EACH_GRAPH = 64
# Steps measured with KV, and requests of each, if that size was measured without KV too.
KV_STEPS, _KV_REQUESTS = 5, 32


def sizes_to_measure(sizes: Sequence[int], graphs: int) -> list[int]:
    """Choose from ``sizes``, the step sizes that vLLM measures, in tokens, ascending. graphs: the
    largest size with a CUDA graph. vLLM needs two sizes beyond it to tell what more tokens cost."""
    beyond = [size for size in sizes if size > graphs]
    kept = [size for rank, size in enumerate(beyond) if rank < 2 or size <= _LONGEST]
    few = [size for size in sizes if size <= min(graphs, _EACH_GRAPH)]
    many = [size for size in sizes if _EACH_GRAPH < size <= graphs]
    # vLLM gives a size that was not measured the cost of the next larger one.
    return few + many[::-2][::-1] + kept


def kv_batch(sizes: Sequence[int], max_model_len: int, longest: int) -> dict[str, int]:
    """Return the step to measure with KV, as arguments of vLLM's dummy runs. sizes: tokens of the
    steps measured without KV, ascending. longest: KV tokens that a request may have."""
    fitting = [size for size in sizes if size <= _KV_REQUESTS]
    size = fitting[-1] if fitting else sizes[0]
    # A request's KV and its new tokens have to fit its longest text.
    return {"num_tokens": size, "context_len": min(longest, max_model_len // 2)}


def kv_token_ms(samples: Sequence[StepTimingSample], context_len: int) -> float:
    """Return the milliseconds that a KV token adds to a step. samples: steps without KV, then
    ``KV_STEPS`` steps with ``context_len`` KV tokens for each request."""
    without, with_kv = samples[:-KV_STEPS], samples[-KV_STEPS:]
    size = with_kv[0].num_target_tokens
    before = [sample.forward_ms for sample in without if sample.num_target_tokens == size]
    longer = median(sample.forward_ms for sample in with_kv) - median(before)
    return max(longer, 0.0) / (with_kv[0].num_reqs * context_len)
