"""How the draft samples for a request, which need not be how the target does.

A draft that is sampled is reported with the distribution q that it was drawn from, and vLLM's
rejection sampler is exact if every such draft is verified. With a grammar, vLLM drops the drafts
that the grammar refuses. Those that are left were not drawn from q but from q without the refused
tokens, and texts would get another distribution. A draft that is proposed with certainty is exact
whichever drafts are dropped: q is then one-hot, and there is nothing to be drawn.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm import SamplingParams


class DraftSampling(NamedTuple):
    """temperature: at which drafts are drawn; 0: they are the draft's likeliest tokens, each
    proposed with certainty. seed: the request's own, None if it has none."""

    temperature: float = 0.0
    seed: int | None = None


CERTAIN = DraftSampling()


def draft_sampling(params: SamplingParams | None) -> DraftSampling:
    """What the draft is told. Drafts of a request with structured output are certain from its
    first token on, even where the grammar starts later, after the model's reasoning."""
    if params is None or _has_grammar(params):
        return CERTAIN
    return DraftSampling(params.temperature, params.seed)


def _has_grammar(params: SamplingParams) -> bool:
    """Whether vLLM restricts the request by a grammar, by the same test as vLLM's scheduler.
    ``response_format`` and the forms of tool calls that are restricted have become
    ``structured_outputs`` before the request reaches the engine."""
    wanted = params.structured_outputs
    return wanted is not None and not wanted.all_constraints_none()


def seed_of(sampling: DraftSampling, engine: str, generation: int) -> int:
    """64 bits, from which the random numbers of a request's drafts follow. Without a seed of its
    own they differ from those of all other requests: engine tells the engine from all others that
    its draft may serve, generation the request from all others of the engine."""
    if sampling.seed is not None:
        return sampling.seed % 2**64  # vLLM's seeds may be negative
    digest = blake2b(f"{engine} {generation}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
