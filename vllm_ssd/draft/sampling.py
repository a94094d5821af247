"""How drafts are sampled: from the draft's likeliest tokens, at the request's temperature, with
random numbers of the draft's own.

The draft reports to the target the distribution that it sampled from, to the last bit: the
``top_m`` likeliest tokens and their probabilities, which add up to 1. Saguaro sampling (arXiv
2603.03251) lowers the probabilities of the tokens that will be predicted as bonus if the draft at
this position is rejected. They are then proposed with less than the target's probability. So after
a rejection the target is likely to sample one of them, which is a hit.
"""

from __future__ import annotations

import torch

from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table.draft_probs import pack


class Sampler:
    """Samples drafts. All tensors stay on the device, in fixed shapes, so that CUDA graphs can
    record it."""

    def __init__(self, policy: DraftPolicy, device: torch.device):
        self._top_m = policy.top_m
        # [top_m]: factors on the probability of each rank
        self._weights = torch.ones(policy.top_m, device=device)
        self._weights[: policy.f] = policy.saguaro

    def sample(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        uniforms: torch.Tensor,
        step: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens int64 [rows]; top_probs float32 [rows], the largest probabilities at their places;
        and draft_probs int64 [rows, top_m] that they were sampled from.

        logits: [rows, vocab]; temperatures: float64 [rows], 0 = the likeliest token with certainty;
        uniforms: float64 [rows, k], uniform in [0, 1); step: int64 [rows], the column that each row
        uses.
        """
        column = step.clamp(max=uniforms.shape[1] - 1).unsqueeze(1)
        top = logits.float().topk(self._top_m, dim=-1)
        temperature = temperatures.float().unsqueeze(1)
        greedy = temperature == 0
        scaled = (top.values / torch.where(greedy, 1.0, temperature)).softmax(dim=-1)
        rank = torch.arange(self._top_m, device=logits.device)
        weighted = torch.where(greedy, (rank == 0).float(), scaled) * self._weights
        probabilities = weighted / weighted.sum(dim=-1, keepdim=True)
        # In float64: its rounding of the sums is negligible compared with float32 probabilities.
        sums = probabilities.double().cumsum(dim=-1)
        target = uniforms.gather(1, column) * sums[:, -1:]
        chosen = (sums <= target).sum(dim=-1, keepdim=True)
        tokens = top.indices.gather(1, chosen).squeeze(1)
        return tokens, scaled[:, 0], pack(top.indices, probabilities)


def one_hot(tokens: torch.Tensor, top_m: int, vocab_size: int) -> torch.Tensor:
    """Tokens int64 [..] -> draft_probs int64 [.., top_m]: each token with probability 1, and top_m
    - 1 other tokens with probability 0, because the tokens of a distribution differ."""
    rank = torch.arange(top_m, device=tokens.device)
    listed = (tokens.unsqueeze(-1) + rank) % vocab_size
    return pack(listed, (rank == 0).float().expand(listed.shape))
