"""Whether a draft's layers may be fused: they can be, and then say what vLLM's say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_ssd.draft.attention.base import PagedAttention
from vllm_ssd.draft.attention.masks import Chunk
from vllm_ssd.draft.fused.layers import FusedLayers
from vllm_ssd.draft.fused.weights import Unsuited, read_weights
from vllm_ssd.log import get_logger

logger = get_logger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# The largest difference of a token's hidden states, as a part of their length: rounding to bfloat16
# in some dozens of layers makes 0.01 to 0.03, and another model 1.
TOLERANCE = 0.1
# Tokens of a text: one of those that kernels are compiled for, some fewer, and the most.
_COUNTS = (5, 24, 128)


def fused_layers(model: Any, forward: Forward, attention: PagedAttention) -> FusedLayers | None:
    """None where vLLM's layers must do: why is one line in the log. forward: theirs. Overwrites KV
    blocks: only before there are requests."""
    if attention.shape.device.type != "cuda":
        return None
    try:
        if attention.shape.dtype != torch.bfloat16:
            # In float16 what a norm multiplies, before it divides, may be too large.
            raise Unsuited(f"has data type {attention.shape.dtype}, not bfloat16")
        fused = FusedLayers(read_weights(model), attention)
    except Unsuited as reason:
        logger.info("SSD: the draft %s: vLLM's layers compute it", reason)
        return None
    try:
        worst = largest_difference(fused, forward, attention)
    except Exception as error:  # those of compilers and drivers are of many kinds
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("SSD: fused layers do not run (%s): vLLM's compute the draft", first_line)
        return None
    if worst <= TOLERANCE:
        return fused
    logger.warning(
        "SSD: the draft's fused layers differ from vLLM's by %.2g, where rounding explains %g: "
        "vLLM's compute the draft",
        worst,
        TOLERANCE,
    )
    return None


def largest_difference(fused: FusedLayers, forward: Forward, attention: PagedAttention) -> float:
    """The largest difference of a token's hidden states to those of ``forward``, as a part of their
    length; nan if that is what comes out."""
    errors = []
    room = min(attention.padding_block * attention.block_size, attention.max_len)
    for count in _COUNTS:
        if count > room:
            continue
        plan = attention.chunk_plan(1, count)
        plan.load([Chunk(range(attention.padding_block), 0, count)])
        attention.plan = plan
        tokens = torch.arange(count, device=attention.shape.device) * 7 % 1000
        reference = forward(tokens, plan.positions).float()
        ours = fused.forward(tokens, plan.positions).float()
        errors.append(((ours - reference).norm(dim=1) / reference.norm(dim=1)).max())
    return torch.stack(errors).max().item()
