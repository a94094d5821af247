"""The draft tokens' distributions over the whole vocabulary, for vLLM's rejection samplers.

A draft token that was not sampled is proposed with certainty: its distribution is one-hot.
"""

from __future__ import annotations

import torch

from vllm_ssd.table.draft_probs import unpack


def dense(draft_probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """draft_probs int64 [rows, k, top_m] -> probabilities float32 [rows, k, vocab_size]."""
    tokens, probabilities = unpack(draft_probs)
    out = torch.zeros(*draft_probs.shape[:2], vocab_size, device=draft_probs.device)
    return out.scatter_(2, tokens, probabilities)


class DraftLogits:
    """Draft tokens' logits for Model Runner V2. ``logits``: float32 [slots, k, vocab], temperature
    times log probability: vLLM divides them by the temperature before its softmax."""

    def __init__(self, slots: int, k: int, top_m: int, vocab_size: int, device: torch.device):
        self._nothing = torch.full((), float("-inf"), device=device)
        self.logits = self._nothing.repeat(slots, k, vocab_size)
        self.logits[:, :, 0] = 0.0
        self._steps = torch.arange(k, device=device).view(1, k, 1)
        # [slots, k, top_m]: where the logits are not -inf
        self._support = torch.zeros(slots, k, top_m, dtype=torch.int64, device=device)

    def update(
        self, slots: torch.Tensor, draft_probs: torch.Tensor, temperatures: torch.Tensor
    ) -> None:
        """Set the logits of some slots. slots: int [rows], all different. draft_probs: int64 [rows,
        k, top_m]. temperatures: float32 [slots]."""
        slots = slots.long()
        rows = slots.view(-1, 1, 1)
        self.logits.index_put_((rows, self._steps, self._support[slots]), self._nothing)
        tokens, probabilities = unpack(draft_probs)
        values = temperatures[slots].view(-1, 1, 1) * probabilities.log()
        # A temperature of 0 times -inf would be NaN.
        values = torch.where(probabilities > 0, values, self._nothing)
        self.logits.index_put_((rows, self._steps, tokens), values)
        self._support[slots] = tokens
