"""What a soak asks for, and whether a greedy answer is the plain server's."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from benchmarks.common.prompts import make_prompts
from benchmarks.common.server import NAME

SHORTEST_PROMPT = 8
STOPS = (".", "\n", ",", " the")
# What structured output may say: texts that part at several places, so that a draft without the
# grammar proposes what the grammar refuses.
CHOICES = (
    "The river is high today, so nobody may cross it before the evening.",
    "The river is high today, so the ferry stays where it is.",
    "The river is low, and everybody crosses it on foot.",
    "No river is near this town.",
)
# Shares of requests; of those that are sampled and free; of all that are free; and of all.
GREEDY, STRUCTURED = 0.4, 1 / 3
TOP_P, SEED, TWICE = 0.5, 0.5, 0.3
STOP, LOGPROBS, ABORT = 0.15, 0.15, 0.15


@dataclass(frozen=True)
class Question:
    """A prompt (token ids) and the most tokens that are asked for after it."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True)
class Request:
    """question: its number. body: of the HTTP request. cut: the number of tokens after which the
    client disconnects; None: it stays until the end."""

    question: int
    body: dict[str, Any]
    cut: int | None = None

    @property
    def greedy(self) -> bool:
        return self.body["temperature"] == 0


@dataclass
class Choice:
    """One of a request's answers, as far as it came. margins: for each token, the log probability
    (natural logarithm) of the likeliest token less that of the second; empty unless asked for."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    margins: list[float] = field(default_factory=list)


def make_questions(
    tokenizer: Any, seed: int, count: int, prompt_tokens: int, tokens: int, longest: int
) -> list[Question]:
    """Prompts of random length up to about `prompt_tokens`, short ones as often as long ones; no
    text is longer than `longest` with its answer."""
    rng = random.Random(seed)
    questions = []
    for number in range(count):
        length = round(math.exp(rng.uniform(math.log(SHORTEST_PROMPT), math.log(prompt_tokens))))
        prompt = make_prompts(tokenizer, number + 1, length)[number]
        questions.append(Question(prompt, min(tokens, longest - len(prompt))))
    return questions


def greedy_request(number: int, question: Question) -> Request:
    """The whole greedy answer."""
    return Request(number, {**_body(question, question.tokens), "temperature": 0})


def reference_request(number: int, question: Question) -> Request:
    """The same, and how close each decision was."""
    closeness = {"logprobs": 2, "return_tokens_as_token_ids": True}
    return Request(number, {**greedy_request(number, question).body, **closeness})


def random_request(rng: random.Random, questions: Sequence[Question]) -> Request:
    """Anything a client may ask for."""
    number = rng.randrange(len(questions))
    tokens = rng.randint(1, questions[number].tokens)
    body = _body(questions[number], tokens)
    kind = rng.random()
    greedy, structured = kind < GREEDY, kind > 1 - STRUCTURED
    body["temperature"] = 0 if greedy else rng.uniform(0.3, 1.3)
    if structured:
        del body["ignore_eos"]
        body["structured_outputs"] = {"choice": CHOICES}
    elif not greedy:
        if rng.random() < TOP_P:
            body["top_p"] = rng.uniform(0.5, 1)
        if rng.random() < SEED:
            body["seed"] = rng.randrange(2**31)
        if rng.random() < TWICE:  # vLLM refuses to repeat a greedy answer
            body["n"] = 2
    if not structured and rng.random() < STOP:
        body["stop"] = rng.choice(STOPS)
    if rng.random() < LOGPROBS:
        body["logprobs"] = rng.randint(0, 5)
    return Request(number, body, rng.randrange(tokens) if rng.random() < ABORT else None)


def _body(question: Question, tokens: int) -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt": question.prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def malformed(request: Request, choice: Choice) -> str | None:
    """What is wrong with a complete answer of any kind, whatever it says."""
    tokens, stop = request.body["max_tokens"], request.body.get("stop")
    if "structured_outputs" in request.body:
        return _unstructured(choice, tokens)
    if stop is not None and stop in choice.text:
        return f"the text goes on after {stop!r}"
    if choice.finish == "length" and len(choice.tokens) == tokens:
        return None
    if choice.finish == "stop" and stop is not None and len(choice.tokens) <= tokens:
        return None
    return f"ended by {choice.finish} after {len(choice.tokens)} of {tokens} tokens"


def _unstructured(choice: Choice, tokens: int) -> str | None:
    """What is wrong with a complete answer that has to be one of `CHOICES`."""
    if choice.finish == "stop" and choice.text in CHOICES:
        return None
    begins_one = any(one.startswith(choice.text) for one in CHOICES)
    if choice.finish == "length" and len(choice.tokens) == tokens and begins_one:
        return None
    return f"{choice.text!r}, ended by {choice.finish}, is not what the grammar allows"


def difference(request: Request, choice: Choice, plain: Choice) -> str | None:
    """Where a greedy answer, complete or not, is not the plain server's; None if it is."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(choice.tokens, plain.tokens))))
    if same < len(choice.tokens):
        text = (
            f"question {request.question} parts after {same} tokens: "
            f"{choice.tokens[same : same + 4]} is not {plain.tokens[same : same + 4]}"
        )
        if plain.margins:
            text += f", where the plain server's margin was {plain.margins[same]:.2g}"
        return text
    if choice.finish == "stop":
        expected = plain.text.split(request.body["stop"])[0]
        if choice.text != expected:
            return f"question {request.question} stops with {choice.text!r}, not {expected!r}"
    return None
