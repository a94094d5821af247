"""Tells whether a draft's layers may be fused: fused layers must exist for them and compute what
vLLM's layers compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_ssd.draft.attention.base import PagedAttention
from vllm_ssd.draft.attention.masks import Chunk
from vllm_ssd.draft.fused.layers import MOST_ROWS, FusedLayers
from vllm_ssd.draft.fused.weights import Unsuited, read_weights
from vllm_ssd.log import get_logger

logger = get_logger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Logits = Callable[[torch.Tensor], torch.Tensor]

# The largest difference of a token's hidden states, relative to their length. Rounding to bfloat16
# in some dozens of layers makes 0.01 to 0.03; another model makes 1.
TOLERANCE = 0.1
# Tokens of a text: fewer than kernels are compiled for, the most of these, and more.
_COUNTS = (5, 24, 128, 200)


def fused_layers(
    model: Any, forward: Forward, logits: Logits, attention: PagedAttention
) -> FusedLayers | None:
    """The draft's fused layers, or None if vLLM's layers must do; the log then says why. forward,
    logits: those of vLLM's layers. Overwrites KV blocks: call this only before there are
    requests."""
    if attention.shape.device.type != "cuda":
        return None
    try:
        if attention.shape.dtype != torch.bfloat16:
            # In float16 the products in a norm, before it divides, may be too large.
            raise Unsuited(f"has data type {attention.shape.dtype}, not bfloat16")
        fused = FusedLayers(read_weights(model), attention)
    except Unsuited as reason:
        logger.info("SSD: the draft %s: vLLM's layers compute it", reason)
        return None
    try:
        worst = largest_difference(fused, forward, logits, attention)
    except Exception as error:  # compilers and drivers raise many kinds
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("SSD: fused layers do not run (%s): vLLM's compute the draft", first_line)
        return None
    if worst <= TOLERANCE:
        return fused
    said = "SSD: fused layers differ from vLLM's by %.2g (rounding: %g): vLLM's compute the draft"
    logger.warning(said, worst, TOLERANCE)
    return None


def largest_difference(
    fused: FusedLayers,
    forward: Forward,
    logits: Logits,
    attention: PagedAttention,
    counts: Sequence[int] = _COUNTS,
) -> float:
    """The largest error over texts of these numbers of tokens; nan if an error is nan. Three errors
    count: how far a token's hidden states are from those of ``forward``, relative to their length;
    how far the logit of the chosen token is below the largest one, relative to the logits' range;
    and how far its probability is from that of the likeliest token."""
    errors = []
    room = min(attention.padding_block * attention.block_size, attention.max_len)
    for count in (count for count in counts if count <= room):
        plan = attention.chunk_plan(1, count)
        plan.fill([Chunk(range(attention.padding_block), 0, count)])
        attention.plan = plan
        tokens = torch.arange(count, device=attention.shape.device) * 7 % 1000
        reference = forward(tokens, plan.positions)
        difference = (fused.forward(tokens, plan.positions) - reference).float().norm(dim=1)
        errors.append((difference / reference.float().norm(dim=1)).max())
        if count > MOST_ROWS:
            continue
        all_logits = logits(reference).float()
        chosen, probs = fused.likeliest(reference, all_logits.shape[1])
        least, largest = all_logits.aminmax(dim=1)
        missing = largest - all_logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
        errors.append((missing / (largest - least)).max())
        errors.append((probs - all_logits.softmax(dim=1).amax(dim=1)).abs().max())
    return torch.stack(errors).max().item()
