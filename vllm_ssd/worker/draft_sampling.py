"""How the draft samples for a request, which need not be how the target does.

A draft that is sampled is reported with the distribution q that it was drawn from, and vLLM's
rejection sampler is exact if every such draft is verified. With a grammar, vLLM drops the drafts
that the grammar refuses. Those that are left were not drawn from q but from q without the refused
tokens, and texts would get another distribution. A draft that is proposed with certainty is exact
whichever drafts are dropped: q is then one-hot, and there is nothing to be drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import SamplingParams


def draft_temperature(params: SamplingParams | None) -> float:
    """The temperature at which the draft samples; 0: it proposes its likeliest tokens, each with
    certainty. That is so for a request with structured output from its first token on, even where
    the grammar starts later, after the model's reasoning."""
    if params is None or _has_grammar(params):
        return 0.0
    return params.temperature


def _has_grammar(params: SamplingParams) -> bool:
    """Whether vLLM restricts the request by a grammar, by the same test as vLLM's scheduler.
    ``response_format`` and the forms of tool calls that are restricted have become
    ``structured_outputs`` before the request reaches the engine."""
    wanted = params.structured_outputs
    return wanted is not None and not wanted.all_constraints_none()
