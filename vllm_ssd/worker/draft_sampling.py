"""Whether and how the draft samples for a request. The target may sample in another way.

The draft reports each sampled draft token with the distribution q that it was drawn from. vLLM's
rejection sampler is exact if every such token is verified. With a grammar, vLLM drops the draft
tokens that the grammar refuses. The others were then not drawn from q, but from q without the
refused tokens, so texts would get another distribution. A draft token proposed with certainty stays
exact whichever tokens are dropped: its q is one-hot, and nothing is drawn.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm import SamplingParams


class DraftSampling(NamedTuple):
    """Settings of the draft's sampling. temperature: of the draws; 0: the draft proposes its
    likeliest tokens with certainty. seed: the request's own, None if it has none."""

    temperature: float = 0.0
    seed: int | None = None


CERTAIN = DraftSampling()
# The switch among a request's extra arguments: ``vllm_xargs`` over HTTP, ``extra_args`` offline.
_SWITCH, _OFF = "ssd", {"0", "false", "off", "no", "none"}


def draft_sampling(params: SamplingParams | None) -> DraftSampling | None:
    """Return the settings that the draft is told; None if the request turned ssd off, as with
    ``extra_args={"ssd": False}``. Draft tokens of a request with structured output are certain from
    its first token on, even if its grammar starts later, after reasoning."""
    extra: dict[str, Any] = (params.extra_args if params is not None else None) or {}
    if str(extra.get(_SWITCH, True)).lower() in _OFF:
        return None
    if params is None or _has_grammar(params):
        return CERTAIN
    return DraftSampling(params.temperature, params.seed)


def _has_grammar(params: SamplingParams) -> bool:
    """Whether vLLM restricts the request by a grammar. vLLM's scheduler uses this test.
    ``response_format`` and restricted forms of tool calls have become ``structured_outputs`` before
    the request reaches the engine."""
    wanted = params.structured_outputs
    return wanted is not None and not wanted.all_constraints_none()


def seed_of(sampling: DraftSampling, engine: str, generation: int) -> int:
    """Return the 64-bit seed of a request's draft tokens. Without a seed of its own, a request gets
    one that differs from all other requests' seeds. ``engine`` differs between all engines that the
    draft may serve, ``generation`` between all requests of an engine."""
    if sampling.seed is not None:
        return sampling.seed % 2**64  # vLLM's seeds may be negative
    return number_from(f"{engine} {generation}")


def number_from(text: str, size: int = 8) -> int:
    """Return a number of ``size`` bytes that follows from a text and looks random."""
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "little")
