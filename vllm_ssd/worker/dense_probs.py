"""What drafts were sampled from, in the form in which vLLM's rejection samplers want it.

A draft that was not sampled is proposed with certainty: its row is one-hot. So no row is ever
without a token, and the drafts' sparse entries say everything.
"""

from __future__ import annotations

import torch

from vllm_ssd.table.draft_probs import unpack


def dense(entries: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Entries int64 [rows, k, top_m] -> probabilities float32 [rows, k, vocab_size]."""
    tokens, probabilities = unpack(entries)
    out = torch.zeros(*entries.shape[:2], vocab_size, device=entries.device)
    return out.scatter_(2, tokens, probabilities)


class DraftLogits:
    """For Model Runner V2. ``logits``: float32 [slots, k, vocab], temperature times logarithm of
    each probability, so that vLLM's division by the temperature leaves the latter."""

    def __init__(self, slots: int, k: int, top_m: int, vocab_size: int, device: torch.device):
        self._nothing = torch.full((), float("-inf"), device=device)
        self.logits = self._nothing.repeat(slots, k, vocab_size)
        self.logits[:, :, 0] = 0.0
        self._steps = torch.arange(k, device=device).view(1, k, 1)
        # [slots, k, top_m]: where the logits are not -inf
        self._support = torch.zeros(slots, k, top_m, dtype=torch.int64, device=device)

    def update(
        self, slots: torch.Tensor, entries: torch.Tensor, temperatures: torch.Tensor
    ) -> None:
        """Take in entries int64 [rows, k, top_m] of the drafts of slots int [rows], all different.
        temperatures: float32 by slot."""
        slots = slots.long()
        rows = slots.view(-1, 1, 1)
        self.logits.index_put_((rows, self._steps, self._support[slots]), self._nothing)
        tokens, probabilities = unpack(entries)
        values = temperatures[slots].view(-1, 1, 1) * probabilities.log()
        # 0 times -inf would be no number.
        values = torch.where(probabilities > 0, values, self._nothing)
        self.logits.index_put_((rows, self._steps, tokens), values)
        self._support[slots] = tokens
