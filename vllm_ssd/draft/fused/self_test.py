"""Whether a draft's layers may be fused: they can be, and then say what vLLM's say."""

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

# The largest difference of a token's hidden states, as a part of their length: rounding to bfloat16
# in some dozens of layers makes 0.01 to 0.03, and another model 1.
TOLERANCE = 0.1
# Tokens of a text: some fewer than kernels are compiled for, the most, and more.
_COUNTS = (5, 24, 128, 200)


def fused_layers(
    model: Any, forward: Forward, logits: Logits, attention: PagedAttention
) -> FusedLayers | None:
    """None where vLLM's layers must do: why is one line in the log. forward, logits: theirs.
    Overwrites KV blocks: only before there are requests."""
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
        worst = largest_difference(fused, forward, logits, attention)
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


def largest_difference(
    fused: FusedLayers,
    forward: Forward,
    logits: Logits,
    attention: PagedAttention,
    counts: Sequence[int] = _COUNTS,
) -> float:
    """Of texts of these numbers of tokens, the largest difference of a token's hidden states to
    those of ``forward``, as a part of their length, or of what is taken for the likeliest token's
    logit to the largest one, as a part of their range; nan if that is what comes out."""
    errors = []
    room = min(attention.padding_block * attention.block_size, attention.max_len)
    for count in counts:
        if count > room:
            continue
        plan = attention.chunk_plan(1, count)
        plan.load([Chunk(range(attention.padding_block), 0, count)])
        attention.plan = plan
        tokens = torch.arange(count, device=attention.shape.device) * 7 % 1000
        reference = forward(tokens, plan.positions)
        difference = (fused.forward(tokens, plan.positions) - reference).float().norm(dim=1)
        errors.append((difference / reference.float().norm(dim=1)).max())
        if count > MOST_ROWS:
            continue
        all_logits = logits(reference).float()
        chosen = fused.likeliest(reference, all_logits.shape[1]).unsqueeze(1)
        least, largest = all_logits.aminmax(dim=1)
        missing = largest - all_logits.gather(1, chosen).squeeze(1)
        errors.append((missing / (largest - least)).max())
    return torch.stack(errors).max().item()
