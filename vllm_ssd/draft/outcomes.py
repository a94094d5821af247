"""Which outcomes of the coming round are worth a branch.

An outcome is ``(accepted, bonus)``. After the glue the draft knows its own logits at every
position of ``[bonus, d_1 .. d_n]``; the token the target samples when it stops after ``j`` drafts
is likely among the top tokens at position ``j``, and it cannot be ``d_{j+1}``, which would then
have been accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PredictedOutcomes:
    """Predicted outcomes of one request's round, position by position, likeliest first."""

    accepted: list[int]
    bonus: list[int]

    def __len__(self) -> int:
        return len(self.accepted)

    def __contains__(self, outcome: tuple[int, int]) -> bool:
        return outcome in zip(self.accepted, self.bonus)


def spread(fan_out: Sequence[int], num_drafts: int) -> list[int]:
    """Branches for each accepted length 0..``num_drafts``, from a fan-out meant for k drafts.

    With fewer than k drafts the budget of the lengths that cannot happen goes to the last one,
    whose bonus is the least certain: nothing has been ruled out there.
    """
    counts = list(fan_out[:num_drafts])
    return [*counts, sum(fan_out) - sum(counts)]


def predict(
    logits: torch.Tensor, drafts: Sequence[int], counts: Sequence[int]
) -> PredictedOutcomes:
    """Choose outcomes from the draft's logits.

    logits: [len(drafts) + 1, vocab], row j after accepting j drafts; changed in place.
    counts: outcomes wanted for each row. Raises ``ValueError`` if the lengths do not fit.
    """
    rows, vocab = logits.shape
    if rows != len(drafts) + 1 or len(counts) != rows:
        raise ValueError(f"{rows} rows of logits for {len(drafts)} drafts and {len(counts)} counts")
    if drafts:
        ruled_out = torch.tensor(drafts, dtype=torch.int64, device=logits.device).unsqueeze(1)
        logits[:-1].scatter_(1, ruled_out, float("-inf"))
    widest = min(max(counts), vocab - 1)
    top = logits.topk(widest, dim=-1).indices.tolist()
    accepted: list[int] = []
    bonus: list[int] = []
    for length, count in enumerate(counts):
        chosen = top[length][:count]
        accepted += [length] * len(chosen)
        bonus += chosen
    return PredictedOutcomes(accepted, bonus)
