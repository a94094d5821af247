"""Folders of models that have a config and a tokenizer, and no weights."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from benchmarks.standin.tiny import tiny_config

WORDS = [f"w{i}" for i in range(60)]


def write_model(folder: Path, words=WORDS, vocab_size=64, layers=1, special=(), **config) -> str:
    """A Llama without weights; without a tokenizer if ``words`` is None. special: tokens that its
    tokenizer has after the words."""
    shape = {"num_hidden_layers": layers, "max_position_embeddings": 256}
    tiny_config(vocab_size, **shape).save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if words is not None:
        write_tokenizer(folder, words, special)
    return str(folder)


def write_tokenizer(folder: Path, words, special=()) -> None:
    """Letters that are words are tokens of a text; the first word stands for all others."""
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    splitting = Tokenizer(model)
    splitting.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=splitting, unk_token=words[0], eos_token=words[1]
    )
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.save_pretrained(folder)
