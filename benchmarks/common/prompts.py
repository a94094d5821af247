"""Prompts of real text and of about a given length, the same in every run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# In the text of a chat: where an answer of the server's belongs.
ANSWER = "\0answer\0"
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
    tokenizer: Any,
    numbers: Iterable[int],
    tokens: int,
    passages: Sequence[str] = PASSAGES,
    turns: int = 1,
) -> list[str]:
    """The chats of these numbers, made of ``passages``; of 8 passages, 40 questions differ. Each of
    the ``turns`` questions has about ``tokens`` tokens, or more where these are too few for the
    chat template and the task."""
    encoded: dict[int, list[int]] = {}

    def passage(place: int) -> list[int]:
        at = place % len(passages)
        if at not in encoded:
            encoded[at] = tokenizer.encode(passages[at], add_special_tokens=False)
        return encoded[at]

    def question(number: int) -> str:
        task = TASKS[number % len(TASKS)]
        bare = tokenizer.encode(chat_text(tokenizer, task), add_special_tokens=False)
        room = max(1, tokens - len(bare))
        text: list[int] = []
        # The passages in a circle, beginning with another one for each prompt.
        place = number
        while len(text) < room:
            text += passage(place)
            place += 1
        return f"{tokenizer.decode(text[:room])}\n\n{task}"

    every = [range(turns * number, turns * (number + 1)) for number in numbers]
    return [chat_text(tokenizer, *map(question, of_chat)) for of_chat in every]


def chat_text(tokenizer: Any, *questions: str) -> str:
    """A chat of these questions in the model's chat template, if it has one. `ANSWER` stands for
    each answer but the last, which the server is to give to all of this."""
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{ANSWER}\n\n".join(questions)
    answer = {"role": "assistant", "content": ANSWER}
    chat = [said for text in questions for said in (answer, {"role": "user", "content": text})]
    text: str = tokenizer.apply_chat_template(chat[1:], tokenize=False, add_generation_prompt=True)
    return text
