"""A tokenizer of few tokens, for what vLLM can only do with one: grammars, bad words, reasoning."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.features.reasoning_parser import THINK

# Each is a text of its own: no two make up another one. The last one ends a thought.
TOKENS = ("a", "b", "c", "d", THINK, ".")


def save_tokenizer(folder: Path, tokens: Sequence[str] = TOKENS) -> None:
    """Put it beside a model's weights."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="a")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens([THINK])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
