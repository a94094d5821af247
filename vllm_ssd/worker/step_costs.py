"""What a verify step costs beside its tokens: its requests' KV is read, once for all drafts of one.

vLLM's own profile makes each token a request with 8192 tokens of KV, so that a draft seems to cost
several times what it does, and runs steps of up to 8192 tokens five times, a tenth of a server's
start. Here tokens are measured without KV, and KV by itself, with fewer steps, and of CUDA graphs
for many tokens each second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import StepTimingSample

# Times that a step of each size without KV is measured, and the tokens of the longest: arithmetic
# limits it, so that what longer ones cost follows from it and the one before.
STEPS, _LONGEST = 3, 2048
# Tokens up to which each CUDA graph is measured. Beyond, neighbours cost nearly the same.
_EACH_GRAPH = 64
# Steps that are measured with KV, and the requests of each, if that size was measured without.
KV_STEPS, _KV_REQUESTS = 5, 32


def sizes_to_measure(sizes: Sequence[int], graphs: int) -> list[int]:
    """Of the steps' sizes that vLLM measures, in tokens, ascending. graphs: the largest size that
    there is a CUDA graph for; vLLM needs two beyond it to tell what further tokens cost."""
    beyond = [size for size in sizes if size > graphs]
    kept = [size for rank, size in enumerate(beyond) if rank < 2 or size <= _LONGEST]
    few = [size for size in sizes if size <= min(graphs, _EACH_GRAPH)]
    many = [size for size in sizes if _EACH_GRAPH < size <= graphs]
    # vLLM takes a size without a figure for as long as the next larger one.
    return few + many[::-2][::-1] + kept


def kv_batch(sizes: Sequence[int], max_model_len: int, longest: int) -> dict[str, int]:
    """The step to measure with KV, as vLLM's dummy runs take it. sizes: tokens of steps that are
    measured without, ascending. longest: tokens of KV that a request may have."""
    fitting = [size for size in sizes if size <= _KV_REQUESTS]
    size = fitting[-1] if fitting else sizes[0]
    # A request's KV and its new tokens have to fit its longest text.
    return {"num_tokens": size, "context_len": min(longest, max_model_len // 2)}


def kv_token_ms(samples: Sequence[StepTimingSample], context_len: int) -> float:
    """Milliseconds that a token of KV adds to a step. samples: of steps without KV, and of
    ``KV_STEPS`` with ``context_len`` tokens for each request at the end."""
    without, with_kv = samples[:-KV_STEPS], samples[-KV_STEPS:]
    size = with_kv[0].num_target_tokens
    before = [sample.forward_ms for sample in without if sample.num_target_tokens == size]
    longer = median(sample.forward_ms for sample in with_kv) - median(before)
    return max(longer, 0.0) / (with_kv[0].num_reqs * context_len)
