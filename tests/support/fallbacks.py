"""Fallbacks as a draft publishes them, and distributions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.table import FALLBACK
from vllm_ssd.table.draft_probs import ONE, pack
from vllm_ssd.table.predictions import PredictionWriter


def publish_fallback(
    writer: PredictionWriter,
    slot: int,
    stamp: Any,
    outcome: tuple[int, int],
    tokens: Sequence[int],
    draft_probs: NDArray[np.int64] | Sequence[int] = (),
) -> None:
    """All of a fallback. stamp: of the outcome; draft_probs: int64 [len(tokens), top_m]."""
    accepted, bonus = outcome
    writer.publish(slot, stamp | FALLBACK, [accepted], [bonus])
    for step, token in enumerate(tokens):
        writer.extend(slot, stamp | FALLBACK, [token], draft_probs[step : step + 1], np.nan)


def sampled_from(drafts: Sequence[int], top_m: int) -> torch.Tensor:
    """int64 [len(drafts), top_m]: what these may have been sampled from."""
    tokens = torch.tensor(drafts).unsqueeze(1) + torch.arange(top_m)
    return pack(tokens, torch.full(tokens.shape, 1 / top_m))


def certain(tokens: torch.Tensor, top_m: int) -> torch.Tensor:
    """Tokens int64 [..] that are proposed with certainty -> draft_probs int64 [.., top_m]."""
    return (tokens | ONE).unsqueeze(-1).expand(*tokens.shape, top_m)
