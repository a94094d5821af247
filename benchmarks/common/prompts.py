"""Prompts of real text and of about a given length, the same in every run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PASSAGES = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").split("\n\n")
# Tasks with long answers: no request is to end before its number of tokens is reached.
TASKS = (
    "Write a long story that takes place here, in many paragraphs.",
    "Explain in detail and step by step what is described here.",
    "Write a long letter to a friend about this, with many details.",
    "Write a lesson about this for children, with questions and answers.",
    "Write a detailed encyclopedia article about this subject.",
)


def make_prompts(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    """The first ``count`` of `make_texts`, as token ids."""
    texts = make_texts(tokenizer, range(count), tokens)
    # The chat template has what a text begins with.
    special = getattr(tokenizer, "chat_template", None) is None
    return [tokenizer.encode(text, add_special_tokens=special) for text in texts]


def make_texts(
    tokenizer: Any, numbers: Iterable[int], tokens: int, passages: Sequence[str] = PASSAGES
) -> list[str]:
    """The chat prompts of these numbers, made of ``passages``; of 8 passages, 40 prompts differ.
    Each has about ``tokens`` tokens, or more where these are too few for the chat template and the
    task."""
    encoded: dict[int, list[int]] = {}

    def passage(place: int) -> list[int]:
        at = place % len(passages)
        if at not in encoded:
            encoded[at] = tokenizer.encode(passages[at], add_special_tokens=False)
        return encoded[at]

    texts = []
    for number in numbers:
        task = TASKS[number % len(TASKS)]
        bare = tokenizer.encode(chat_text(tokenizer, task), add_special_tokens=False)
        room = max(1, tokens - len(bare))
        text: list[int] = []
        # The passages in a circle, beginning with another one for each prompt.
        place = number
        while len(text) < room:
            text += passage(place)
            place += 1
        texts.append(chat_text(tokenizer, f"{tokenizer.decode(text[:room])}\n\n{task}"))
    return texts


def chat_text(tokenizer: Any, content: str) -> str:
    """One question in the model's chat template, if it has one."""
    if getattr(tokenizer, "chat_template", None) is None:
        return content
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return text
