"""The prompts of a tuning: the user's own, or built-in ones of several kinds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# A chat template that passes a prompt on unchanged, like vLLM's completions.
AS_TEXT = "{{ bos_token }}{{ messages[0].content }}"

# Prompts of several kinds, because each draft is good at some kinds only.
BUILT_IN = (
    "Write a Python function that merges two sorted lists, with a docstring and three tests.",
    "Explain to a ten-year-old why the moon has phases.",
    "List the planets of the solar system as a JSON array of objects with name, radius and moons.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Write a polite letter to a landlord about a heater that has been broken for two weeks.",
    "A train leaves at 14:10 and arrives at 17:55, with two stops of ten minutes. How long does it "
    "move? Think step by step.",
    "Translate into French: The bakery on the corner opens early, and its bread is gone by nine.",
    "Compare solar and wind power for a small village: costs, reliability, upkeep. Use headings.",
    "Write an SQL query for the three customers with the most orders in each month; explain it.",
    "What should someone know before adopting a dog from a shelter? Answer in ten points.",
    "Refactor this and say why: for i in range(len(a)):\n    if a[i] == x:\n        found = True",
    "Summarize the causes and the consequences of the invention of the printing press.",
)


def has_chat_template(model: ModelConfig) -> bool:
    """Whether vLLM has a chat template for a model: the model's own or a fallback."""
    from transformers import PreTrainedTokenizerBase
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return True  # these tokenizers have the template in their code
    return resolve_chat_template(tokenizer, None, None, model_config=model) is not None


class _Line(msgspec.Struct):
    prompt: str


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: one per line, or in a .jsonl file the "prompt" of one JSON object per
    line. Raises ``ValueError`` with a sentence if there are none."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            lines = [msgspec.json.decode(line, type=_Line).prompt for line in lines]
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ValueError(
            f"{path} cannot be read as prompts ({error}): write one a line, or in a .jsonl file "
            '{"prompt": "..."}'
        ) from None
    if not lines:
        raise ValueError(f"there are no prompts in {path}: write one a line")
    return lines
