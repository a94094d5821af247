"""What a request may ask for that changes which tokens may come next, or how likely they are:
sampled texts of each have the target's distribution under it."""

from collections.abc import Collection

import torch

from tests.support.sampled_texts import PROMPT, TEXTS, VOCAB, Case, Change
from tests.support.tiny_tokenizer import TOKENS

A, B, C, D, THOUGHT, END = range(len(TOKENS))
# A prompt that asks for thoughts, which end with ".", before the rest.
THINKING = (THOUGHT, B, C, C)
SOME = TEXTS // 4


def without(refused: Collection[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits of a token that is none of these."""
    return logits.index_fill(0, torch.tensor(list(refused), dtype=torch.int64), float("-inf"))


def only(allowed: Collection[int]) -> Change:
    """No other tokens."""
    refused = set(range(VOCAB)) - set(allowed)
    return lambda text, logits: without(refused, logits)


def grammar(regex: str, thinks: bool = False) -> Case:
    """Texts of characters out of ``[..]``, of which the draft does not know; it likes others, too.
    thinks: only after the end of the model's thoughts."""
    from vllm.sampling_params import StructuredOutputsParams

    restricted = only([TOKENS.index(character) for character in regex[1 : regex.index("]")]])
    settings = {"structured_outputs": StructuredOutputsParams(regex=regex)}
    if not thinks:
        return Case(settings, restricted, texts=SOME)

    def change(text: list[int], logits: torch.Tensor) -> torch.Tensor:
        return restricted(text, logits) if END in text else logits

    return Case(settings, change, THINKING)


def penalties() -> Case:
    settings = {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": 0.6}

    def change(text: list[int], logits: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=VOCAB)
        seen = (counts > 0).index_fill(0, torch.tensor(PROMPT), True)
        repeated = torch.where(logits > 0, logits / 1.4, logits * 1.4)
        return torch.where(seen, repeated, logits) - 0.4 * counts - 0.6 * (counts > 0)

    return Case(settings, change, texts=SOME)


def thinking_budget(counts_anew: bool) -> Case:
    """At the third place at the latest thoughts have ended: the prompt has three tokens of them.
    counts_anew: thoughts that begin again have the whole budget again, as under Model Runner V2."""

    def change(text: list[int], logits: torch.Tensor) -> torch.Tensor:
        again = counts_anew and THOUGHT in text
        ends = END not in text and len(text) == 2 and not again
        return only([END])(text, logits) if ends else logits

    return Case({"thinking_token_budget": 5}, change, THINKING, SOME)


def features(counts_anew: bool = False) -> dict[str, Case]:
    """counts_anew: as for ``thinking_budget``."""
    return {
        "grammar": grammar("[ad.]{9}"),
        "grammar after thoughts": grammar("[ad.]{9}", thinks=True),
        "allowed tokens": Case(
            {"allowed_token_ids": [A, B, D, THOUGHT]}, only([A, B, D, THOUGHT]), texts=SOME
        ),
        # One that is a token, and one that is two.
        "bad words": Case(
            {"bad_words": ["ab", "c"]},
            lambda text, logits: without([C, B] if text[-1:] == [A] else [C], logits),
            texts=SOME,
        ),
        # A stop token, which a draft may be, at the second place earliest.
        "stop token, least tokens": Case(
            {"stop_token_ids": [D], "min_tokens": 1},
            lambda text, logits: logits if text else without([D], logits),
            texts=SOME,
            stop=D,
        ),
        "penalties": penalties(),
        "thinking budget": thinking_budget(counts_anew),
        "logprobs": Case({"logprobs": 2}, texts=SOME),
    }
