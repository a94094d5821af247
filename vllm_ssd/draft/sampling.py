"""How drafts are sampled: from the draft's likeliest tokens, at the request's temperature, with
random numbers of the draft's own.

The draft reports to the target the distribution that it sampled from, to the last bit: the
``top_m`` likeliest tokens and their probabilities, which add up to 1. Saguaro sampling (arXiv
2603.03251) lowers the probabilities of the tokens that will be predicted as bonus if the draft at
this position is rejected. They are then proposed with less than the target's probability. So after
a rejection the target is likely to sample one of them, which is a hit.

The random numbers follow from the request's seed, from where in its text a branch begins, and from
the draft's place in the branch. They follow from nothing else: not from which outcome the branch is
for, when it is drafted, in which batch, or by which draft server. So the same seed gives the same
drafts.

No number is used for two drafts that the target verifies. A round verifies drafts of one branch at
most, and the next round's branches begin further on in the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

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


# Half of the generator's key. The target uses the same seed with other generators. Even with the
# same generator, its numbers would differ from these.
_DRAFTS = 0x5BD1E995_76737364
_WORDS = 4  # random words for each number that Philox counts


def uniforms(seeds: Sequence[int], places: ArrayLike, k: int) -> NDArray[np.float64]:
    """float64 [requests, branches, k], uniform in [0, 1): the numbers of up to ``k`` drafts of each
    branch. seeds: of each request, 64 bits; places: int [requests, branches], the index in the text
    of each branch's first draft. Fast if those of a request lie close together."""
    at = np.array(places)
    first = at.min(axis=1, keepdims=True)
    at -= first
    blocks, span = -(-k // _WORDS), int(at.max()) + 1
    words = np.empty((len(at), span, blocks * _WORDS), np.uint64)
    # To set a generator's state takes a tenth of the time of making a generator.
    generator = np.random.Philox(0)
    state = generator.state
    key, counter = state["state"]["key"], state["state"]["counter"]
    key[1] = _DRAFTS
    for own, seed, begin in zip(words, seeds, first[:, 0].tolist()):
        key[0], counter[0] = seed, begin * blocks
        generator.state = state
        own[:] = generator.random_raw(own.size).reshape(own.shape)
    numbers = words[np.arange(len(at))[:, None], at, :k]
    # 32 bits, so that in float64 a product with a sum of probabilities is below the sum
    return (numbers >> np.uint64(32)).astype(np.float64) * 2.0**-32
