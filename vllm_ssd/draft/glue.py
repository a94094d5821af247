"""What a glue shows the model of one request, and what it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.budget import RoundShape
from vllm_ssd.draft.fan_out import outcomes
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.request import DraftRequest


class Glue(NamedTuple):
    """One request's part of a glue: ``tokens`` are shown as ``chunk``; the hidden states after the
    last of them are kept, in the rows ``kept``; ``tree`` is planted for the outcomes of
    ``prediction``. Both None: nothing is drafted ahead, and the next outcome gets a fallback when
    it comes."""

    request: DraftRequest
    chunk: Chunk
    tokens: list[int]
    kept: Sequence[int]
    tree: Tree | None
    prediction: Prediction | None


def make_glue(
    request: DraftRequest, shape: RoundShape, verified: Sequence[int], steps: int, has_room: bool
) -> Glue:
    """Show a request's unfed tokens, for which KV is reserved. shape: of its round. verified: rows
    for hidden states, of the text's end and of each draft. steps: that its tree has room for.
    has_room: KV is reserved for the tree too; if not, there is none."""
    chunk, tokens = request.feed(request.unfed)
    kept = verified[len(request.states) :]
    states = [*request.states, *kept]
    request.states = list(verified) if has_room else []  # where the prediction leaves them
    if not has_room:
        return Glue(request, chunk, tokens, kept, None, None)
    accepted, ranks = outcomes(shape.fan_out, len(request.drafts))
    text = len(request.tokens)
    tree = request.plant([text + length for length in accepted], steps)
    prediction = Prediction(
        request.where,
        request.next_stamp,
        states=states,
        verified=verified,
        accepted=accepted,
        ranks=ranks,
        drafts=request.drafts,
        steps=shape.steps,
    )
    return Glue(request, chunk, tokens, kept, tree, prediction)
