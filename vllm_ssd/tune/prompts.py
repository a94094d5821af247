"""The prompts of a tuning: the user's own, or a few of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_ssd.tune.records import Prompt

# Code, explanation, facts in a fixed form, a story, a letter, reasoning, translation, summary:
# drafts differ in what they are good at.
_QUESTIONS = (
    "Write a Python function that merges two sorted lists, with a docstring and three tests.",
    "Explain to a ten-year-old why the moon has phases.",
    "List the planets of the solar system as a JSON array of objects with name, radius and moons.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Write a polite letter to a landlord about a heater that has been broken for two weeks.",
    "A train leaves at 14:10 and arrives at 17:55, with two stops of ten minutes. For how long "
    "does it move? Think step by step.",
    "Translate into French: The bakery on the corner opens early, and its bread is gone by nine.",
    "Compare solar and wind power for a small village: costs, reliability, upkeep. Use headings.",
    "Write an SQL query for the three customers with the highest total of orders in each month, "
    "and explain each part of it.",
    "What should someone know before adopting a dog from a shelter? Answer in ten points.",
    "Refactor this and say what you changed: for i in range(len(a)):\n    if a[i] == x:\n        "
    "found = True\nprint(found)",
    "Summarize the causes and the consequences of the invention of the printing press.",
)


def built_in() -> list[Prompt]:
    """One question each, of many kinds."""
    return [_question(text) for text in _QUESTIONS]


def read_prompts(path: Path) -> list[Prompt]:
    """Of a file: a question a line; or, if it ends with .jsonl, an object a line, with "messages"
    for the chat template or a "prompt" that is taken as it is. ``ValueError`` with a sentence if
    there are none."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): name a file of prompts"
        ) from None
    if path.suffix != ".jsonl":
        found = [_question(line) for line in lines]
    else:
        found = [_decode(line, path, number) for number, line in enumerate(lines, 1)]
    if not found:
        raise ValueError(f"there are no prompts in {path}: write one a line")
    return found


def token_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """As the model reads it. One without a chat template reads the messages as lines."""
    if prompt.messages is None:
        return list(tokenizer.encode(prompt.prompt))
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode("\n".join(each["content"] for each in prompt.messages)))
    text = tokenizer.apply_chat_template(
        prompt.messages, tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def in_turn(prompts: Sequence[list[int]], first: int, count: int) -> list[list[int]]:
    """``count`` of them, from number ``first`` on, in a circle."""
    return [prompts[number % len(prompts)] for number in range(first, first + count)]


def _question(text: str) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}])


def _decode(line: str, path: Path, number: int) -> Prompt:
    try:
        prompt = msgspec.json.decode(line, type=Prompt)
    except msgspec.DecodeError as error:
        raise ValueError(
            f'prompt {number} of {path} is none ({error}): write {{"prompt": "..."}} or '
            '{"messages": [{"role": "user", "content": "..."}]}'
        ) from None
    if (prompt.messages is None) == (prompt.prompt is None):
        raise ValueError(
            f'prompt {number} of {path} must have either "messages" or "prompt": write one of them'
        )
    return prompt
