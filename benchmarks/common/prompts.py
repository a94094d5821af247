"""Prompts of real text and of about a given length, the same in every run."""

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
    """Return `count` chat prompts as token ids; the first 40 differ. Each has about `tokens`
    tokens, or more where these are too few for the chat template and the task."""
    passages = [tokenizer.encode(passage, add_special_tokens=False) for passage in PASSAGES]
    prompts = []
    for number in range(count):
        task = TASKS[number % len(TASKS)]
        room = max(1, tokens - len(_chat(tokenizer, task)))
        text: list[int] = []
        # The passages in a circle, beginning with another one for each prompt.
        place = number
        while len(text) < room:
            text += passages[place % len(passages)]
            place += 1
        prompts.append(_chat(tokenizer, f"{tokenizer.decode(text[:room])}\n\n{task}"))
    return prompts


def _chat(tokenizer: Any, content: str) -> list[int]:
    """Token ids of one question in the model's chat template, if it has one."""
    if getattr(tokenizer, "chat_template", None) is None:
        ids: list[int] = tokenizer.encode(content)
        return ids
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids
