"""The prompts of each load."""

from collections.abc import Mapping
from typing import Any

from benchmarks.common.prompts import chat_text, make_texts
from benchmarks.serving.datasets import Dataset
from benchmarks.serving.records import Load
from benchmarks.standin.folders import say


class Prompts:
    """Chats of data sets in the target's chat template. longest: tokens of all questions of a chat
    that server and client take where data sets have lengths of their own."""

    def __init__(self, tokenizer: Any, datasets: Mapping[str, Dataset], longest: int):
        self._tokenizer = tokenizer
        self._datasets = datasets
        self._longest = longest
        self._chats: dict[str, list[str]] = {}

    def take(self, load: Load, first: int) -> list[str]:
        """One prompt for each request of ``load``, beginning with the data set's prompt number
        ``first``, so that loads after one another need not find their prompts cached. They come
        again where the data set has too few."""
        numbers = range(first, first + load.requests)
        dataset = self._datasets[load.dataset]
        if load.prompt_tokens is not None:
            passages = [question for chat in dataset.chats for question in chat]
            length = load.prompt_tokens
            return make_texts(self._tokenizer, numbers, length, passages, load.turns)
        chats = self._of(dataset)
        return [chats[number % len(chats)] for number in numbers]

    def _of(self, dataset: Dataset) -> list[str]:
        """All chats that clients take."""
        if dataset.name not in self._chats:
            chats = [chat_text(self._tokenizer, *questions) for questions in dataset.chats]
            kept = [chat for chat in chats if self._tokens(chat) <= self._longest]
            if not kept:
                raise ValueError(
                    f"all prompts of {dataset.name} have more than {self._longest} tokens: "
                    "allow longer ones with --max-model-len, or cut them with --prompt-tokens"
                )
            if len(kept) < len(chats):
                about = f"{len(chats) - len(kept)} prompts of more than {self._longest} tokens"
                say(f"{dataset.name}: left out {about}")
            self._chats[dataset.name] = kept
        return self._chats[dataset.name]

    def _tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))
