"""The tokenizer of a GGUF file, written as Hugging Face tokenizer files."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.standin.checkpoint import write_json

_CONTROL = 3  # GGUF's token type of special tokens


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included.

    `metadata` is a GGUF file's, with its tokenizer in tokenizer.ggml.*. Raises ValueError if that
    is not the byte-level BPE of the SmolLM family: another needs another pre-tokenizer.
    """
    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"expected the tokenizer gpt2/smollm, not {'/'.join(kind)}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    def named(role: str) -> str:
        return str(tokens[metadata[f"tokenizer.ggml.{role}_token_id"]])

    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "bos_token": named("bos"),
            "eos_token": named("eos"),
            "unk_token": named("unknown"),
            "pad_token": named("padding"),
            "additional_special_tokens": special,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )
