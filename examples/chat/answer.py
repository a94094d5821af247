"""One answer of a server: its text as it comes, and how fast it came."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from examples.chat import counters
from examples.chat.counters import Speculation

Message = ChatCompletionMessageParam


@dataclass
class Answer:
    """An answer so far. tokens: as the server counts them, 0 until it is complete. Times are in
    seconds: asked and ended (the newest text) on this process's clock, first_s from the question to
    the first text."""

    text: str = ""
    tokens: int = 0
    asked: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    first_s: float | None = None
    speculation: Speculation = field(default_factory=lambda: Speculation(None, None))

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: what came after the first token, in the time after it."""
        if self.first_s is None or self.ended is None:
            return 0.0
        seconds = self.ended - self.asked - self.first_s
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0

    def summary(self) -> str:
        """One line: tokens, tokens/s, time to the first token, and what is known of the rounds."""
        parts = [f"{self.tokens} tokens", f"{self.tokens_per_second:.1f} tokens/s"]
        if self.first_s is not None:
            parts.append(f"first token after {self.first_s * 1000:.0f} ms")
        if self.speculation.tokens_per_round is not None:
            parts.append(f"{self.speculation.tokens_per_round:.2f} tokens a round")
        if self.speculation.hit_rate is not None:
            parts.append(f"{self.speculation.hit_rate:.0%} hits")
        if self.speculation.off_rate:
            share = self.speculation.off_rate
            which = f"{share:.0%} of the rounds " if share < 1 else ""
            parts.append(f"{which}without draft tokens")
        return ", ".join(parts)


class Endpoint:
    """A server as a client sees it. url: for example http://localhost:8000, with or without /v1."""

    def __init__(self, url: str):
        self.url = url.rstrip("/").removesuffix("/v1")
        # vLLM asks for a key only if it was told to.
        self._client = OpenAI(base_url=f"{self.url}/v1", api_key="none")
        self.model: str = self._client.models.list().data[0].id

    def ask(
        self, messages: list[Message], temperature: float, max_tokens: int | None
    ) -> Iterator[Answer]:
        """The answer to a conversation, again and again while it grows; the last time with its
        tokens counted. max_tokens: of the answer, at most; None: what fits."""
        before = counters.read(self.url)
        answer = Answer()
        stream = self._client.chat.completions.create(
            model=self.model,
            messages=messages,
            temperature=temperature,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        with stream:
            for chunk in stream:
                now = time.perf_counter()
                text = chunk.choices[0].delta.content if chunk.choices else None
                if text:
                    answer.text += text
                    answer.ended = now
                    if answer.first_s is None:
                        answer.first_s = now - answer.asked
                if chunk.usage is not None:
                    answer.tokens = chunk.usage.completion_tokens
                yield answer
        answer.speculation = counters.between(before, counters.read(self.url))
        yield answer
