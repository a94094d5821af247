"""What a glue shows the model of one request, and what it predicts from there."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ssd.draft.attention.masks import Chunk, Tree
from vllm_ssd.draft.budget import RoundShape
from vllm_ssd.draft.fan_out import spread
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.request import DraftRequest


@dataclass(frozen=True)
class Glue:
    """One request's part of a glue: ``tokens`` are shown as ``chunk``; ``tree`` is planted for the
    outcomes of ``prediction``. Both None: nothing is drafted ahead, and the next outcome gets a
    fallback when it comes."""

    request: DraftRequest
    chunk: Chunk
    tokens: list[int]
    tree: Tree | None
    prediction: Prediction | None


def make_glue(request: DraftRequest, shape: RoundShape, k: int, has_room: bool) -> Glue:
    """Show a request's unfed tokens, for which KV is reserved. shape: of its round. k: steps that
    its tree has room for. has_room: KV is reserved for the tree too; if not, there is none."""
    chunk, tokens = request.feed(request.unfed)
    if not has_room:
        return Glue(request, chunk, tokens, None, None)
    counts = spread(shape.fan_out, len(request.drafts))
    accepted = [length for length, count in enumerate(counts) for _ in range(count)]
    tree = request.plant([len(request.tokens) + length for length in accepted], k)
    first = chunk.query_len - len(counts)  # the query of the newest token of the text
    prediction = Prediction(
        request.slot,
        int(request.next_stamp),
        rows=[first + length for length in accepted],
        ranks=[rank for count in counts for rank in range(count)],
        accepted=accepted,
        ruled_out=[-1] * first + request.drafts + [-1],
        steps=shape.steps,
    )
    return Glue(request, chunk, tokens, tree, prediction)
