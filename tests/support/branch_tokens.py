"""``BranchTokens`` of trees that are alike."""

import torch

from vllm_ssd.table.publisher import BranchTokens


def alike(
    where: torch.Tensor,
    stamps: torch.Tensor,
    tokens: torch.Tensor,
    top_probs: torch.Tensor,
    step: int,
    draft_probs: torch.Tensor | None = None,
) -> BranchTokens:
    """One more token for each branch. tokens: int64 [trees, branches]; top_probs, draft_probs: the
    same shape, and [.., top_m]; step: of all branches."""
    trees, branches = tokens.shape
    first = torch.arange(trees, device=tokens.device) * branches
    return BranchTokens(
        where,
        stamps,
        first,
        torch.full_like(first, branches),
        tokens.reshape(-1),
        top_probs.reshape(-1),
        torch.full_like(tokens.reshape(-1), step),
        tokens.new_zeros(tokens.numel(), 0) if draft_probs is None else draft_probs.flatten(0, 1),
    )
