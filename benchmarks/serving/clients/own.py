"""A client in this process, which needs nothing but aiohttp."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import numpy as np

from benchmarks.common.prompts import ANSWER
from benchmarks.common.server import NAME
from benchmarks.common.streaming import RequestFailed, session, stream
from benchmarks.serving.clients.task import ClientFailed, Task
from benchmarks.serving.records import Load, Seen, Spread

_STALL_S = 3600.0


class OwnClient:
    """Streams completions, a chat's one after the other; counts tokens as the server does."""

    def check(self) -> None:
        """It runs everywhere."""

    def measure(self, task: Task) -> Seen:
        """Run a load. `ClientFailed` if a request fails."""
        started = time.monotonic()
        try:
            chats = asyncio.run(_ask_all(task.url, task.prompts, task.load))
        except (aiohttp.ClientError, RequestFailed) as error:
            raise ClientFailed(str(error)) from None
        seconds = time.monotonic() - started
        # Decoded now, so that decoding delays no other answer. A chat's history cannot wait.
        return sum_up([[_decode(*turn) for turn in chat] for chat in chats], seconds)


@dataclass
class Answer:
    """Seconds from the request to the arrival of each message with tokens; the text, and the number
    of its tokens."""

    arrivals_s: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0

    @property
    def itls_s(self) -> list[float]:
        """Seconds between messages."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None without such."""
        seconds = self.arrivals_s[-1] - self.arrivals_s[0]
        return seconds / (self.tokens - 1) if self.tokens > 1 else None


def sum_up(chats: Sequence[Sequence[Answer]], seconds: float) -> Seen:
    """The figures of all answers, one at least, which took ``seconds`` together."""
    answers = [answer for chat in chats for answer in chat]
    tpots = [answer.tpot_s for answer in answers]
    return Seen(
        completed=len(answers),
        seconds=seconds,
        tokens=sum(answer.tokens for answer in answers),
        e2e=spread([answer.arrivals_s[-1] for answer in answers]),
        ttft=spread([answer.arrivals_s[0] for answer in answers]),
        itl=spread([itl for answer in answers for itl in answer.itls_s]),
        tpot=spread([tpot for tpot in tpots if tpot is not None]),
        gap=spread([max(answer.itls_s, default=0.0) for answer in answers]),
        texts=[ANSWER.join(answer.text for answer in chat) for chat in chats],
    )


def spread(seconds: Sequence[float]) -> Spread:
    """Mean, median and 99th percentile in ms of times in seconds; zeros if there are none."""
    times = 1000 * np.asarray(seconds or [0.0])
    p50, p99 = np.percentile(times, (50, 99))
    return Spread(float(times.mean()), float(p50), float(p99))


_Stream = tuple[float, list[tuple[float, bytes]]]  # when asked, and when each message came


async def _ask_all(url: str, prompts: Sequence[str], load: Load) -> list[list[_Stream]]:
    places = asyncio.Semaphore(load.concurrency or len(prompts))
    async with session(url, _STALL_S) as opened:

        async def chat(prompt: str) -> list[_Stream]:
            history, turns = "", list[_Stream]()
            async with places:
                for text in prompt.split(ANSWER):
                    history += _decode(*turns[-1]).text + text if turns else text
                    begun, body = time.monotonic(), _body(load, history)
                    lines = [(time.monotonic(), line) async for line in stream(opened, body)]
                    turns.append((begun, lines))
            return turns

        return await asyncio.gather(*map(chat, prompts))


def _body(load: Load, prompt: str) -> dict[str, object]:
    return {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": load.tokens,
        "ignore_eos": True,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _decode(begun: float, messages: Sequence[tuple[float, bytes]]) -> Answer:
    answer = Answer()
    for now, line in messages:
        message = json.loads(line)
        if message.get("usage"):
            answer.tokens = message["usage"]["completion_tokens"]
        for choice in message.get("choices", ()):
            answer.arrivals_s.append(now - begun)
            answer.text += choice["text"]
    if not answer.arrivals_s or not answer.tokens:
        last = messages[-1][1].decode() if messages else "nothing"
        raise ClientFailed(f"an answer has no tokens: {last}")
    return answer
