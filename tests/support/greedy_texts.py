"""What a model says by itself, by transformers: what an engine's texts are compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from benchmarks.soak.requests import Choice


def greedy_texts(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The likeliest ``tokens`` tokens after each prompt. Rows end where they end: nothing is padded
    before a text, and causal attention does not see what is after it."""
    sizes = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(max(sizes))
    rows = torch.zeros(len(prompts), longest + tokens, dtype=torch.long)
    for row, prompt in zip(rows, prompts):
        row[: len(prompt)] = torch.tensor(prompt)
    numbers = torch.arange(len(rows))
    with torch.inference_mode():
        for done in range(tokens):
            logits = model(rows[:, : longest + done]).logits
            rows[numbers, sizes + done] = logits[numbers, sizes + done - 1].argmax(-1)
    return [row[size : size + tokens].tolist() for row, size in zip(rows, sizes.tolist())]


def tiny_answers(folder: Path | str, prompts: Sequence[Sequence[int]], tokens: int) -> list[Choice]:
    """As a server whose target has this folder's function gives them, without its text."""
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    return [Choice("", text, "length") for text in greedy_texts(model, prompts, tokens)]


def text_answers(
    folder: str, prompts: Sequence[str], tokens: int
) -> list[tuple[list[int], str | None]]:
    """Token ids and finish reason of each answer, as ``harness.texts`` returns them."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    rows = tokenizer(list(prompts), padding=True, return_tensors="pt")
    with torch.inference_mode():
        found = model.generate(**rows, do_sample=False, max_new_tokens=tokens)
    generated = found[:, rows["input_ids"].shape[1] :].tolist()
    return [ended(text, tokenizer.eos_token_id) for text in generated]


def ended(text: list[int], end: int) -> tuple[list[int], str | None]:
    """The text to this token, if it has that."""
    return (text[: text.index(end) + 1], "stop") if end in text else (text, "length")


def image_answers(
    folder: str, prompts: Sequence[Any], tokens: int
) -> list[tuple[list[int], str | None]]:
    """As ``text_answers``, of prompts as vLLM takes them, with images or without."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).float().eval()
    end = processor.tokenizer.eos_token_id

    def answer(prompt: Any) -> tuple[list[int], str | None]:
        text, images = prompt, None
        if not isinstance(prompt, str):
            text, images = prompt["prompt"], prompt["multi_modal_data"]["image"]
        row = processor(text=text, images=images, return_tensors="pt")
        with torch.inference_mode():
            found = model.generate(
                **row, do_sample=False, max_new_tokens=tokens, eos_token_id=end, pad_token_id=end
            )
        return ended(found[0, row["input_ids"].shape[1] :].tolist(), end)

    return [answer(prompt) for prompt in prompts]


def stopped(
    folder: str, answers: Sequence[tuple[list[int], str | None]], stop: Sequence[str]
) -> list[tuple[list[int], str | None]]:
    """What these answers are if they end where one of the strings ``stop`` has come."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def end(tokens: list[int]) -> int | None:
        for size in range(1, len(tokens) + 1):
            if any(each in tokenizer.decode(tokens[:size]) for each in stop):
                return size
        return None

    return [
        (tokens, reason) if (size := end(tokens)) is None else (tokens[:size], "stop")
        for tokens, reason in answers
    ]
