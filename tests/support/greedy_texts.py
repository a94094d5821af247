"""What a model says by itself, by transformers: what an engine's texts are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

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


def tiny_answers(folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[Choice]:
    """As a server whose target has this folder's function gives them, without its text."""
    model = LlamaForCausalLM.from_pretrained(folder).float().eval()
    return [Choice("", text, "length") for text in greedy_texts(model, prompts, tokens)]
