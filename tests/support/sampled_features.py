"""What a request may ask for that changes which tokens may come next, or how likely they are:
sampled texts of each have the target's distribution under it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from tests.support.sampled_texts import TEXTS, VOCAB, Case, Change
from tests.support.tiny_tokenizer import TOKENS

END = len(TOKENS) - 1  # "."
THINKING = (4, 1, 2, 2)  # a prompt that asks for thoughts, which end with ".", before the rest


def only(allowed: Collection[int]) -> Change:
    """No other tokens."""

    def change(text: list[int], logits: torch.Tensor) -> torch.Tensor:
        refused = torch.tensor([token not in allowed for token in range(VOCAB)])
        return logits.masked_fill(refused, float("-inf"))

    return change


def grammar(regex: str, thinks: bool = False) -> Case:
    """Texts of characters out of ``[..]``, of which the draft does not know; it likes others, too.
    thinks: only after the end of the model's thoughts."""
    from vllm.sampling_params import StructuredOutputsParams

    restricted = only([TOKENS.index(character) for character in regex[1 : regex.index("]")]])
    settings = {"structured_outputs": StructuredOutputsParams(regex=regex)}
    if not thinks:
        return Case(settings, restricted, texts=TEXTS // 4)

    def change(text: list[int], logits: torch.Tensor) -> torch.Tensor:
        return restricted(text, logits) if END in text else logits

    return Case(settings, change, THINKING)


def features() -> dict[str, Case]:
    return {
        "grammar": grammar("[ad.]{9}"),
        "grammar after thoughts": grammar("[ad.]{9}", thinks=True),
    }
