"""A client in this process, which needs nothing but aiohttp."""

import asyncio
import json
import random
import time
from collections.abc import Sequence

import aiohttp

from benchmarks.common.server import NAME
from benchmarks.serving.clients.client import Answer, ClientFailed, Task, sum_up
from benchmarks.serving.records import Load, Seen

_LIMIT_S = 3600.0  # of an answer
_DATA = b"data: {"


class OwnClient:
    """Streams completions, and counts tokens as the server does."""

    longest_prompt: int | None = None

    def check(self) -> None:
        """It runs everywhere."""

    def measure(self, task: Task) -> Seen:
        """As `Client.measure`."""
        started = time.monotonic()
        try:
            answers = asyncio.run(_ask_all(task.url, task.prompts, task.load))
        except aiohttp.ClientError as error:
            raise ClientFailed(str(error)) from None
        return sum_up(answers, time.monotonic() - started, task.bounds)


async def _ask_all(url: str, prompts: Sequence[str], load: Load) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    places = asyncio.Semaphore(load.concurrency or len(prompts))
    # The same arrivals on every side.
    chance = random.Random(0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def ask(prompt: str) -> Answer:
            async with places:
                return await _ask(session, _body(load, prompt))

        asked = []
        for prompt in prompts:
            asked.append(asyncio.create_task(ask(prompt)))
            if load.rate is not None:
                await asyncio.sleep(chance.expovariate(load.rate))
        return await asyncio.gather(*asked)


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


async def _ask(session: aiohttp.ClientSession, body: dict[str, object]) -> Answer:
    begun = last = time.monotonic()
    answer: Answer | None = None
    message = b""
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"the server refused a request: {await response.text()}")
        async for line in response.content:
            if not line.startswith(_DATA):
                continue
            now = time.monotonic()
            message = line
            if b'"choices":[]' in line.replace(b" ", b""):  # the usage, which has no tokens
                continue
            if answer is None:
                answer = Answer(now - begun)
            else:
                answer.itls_s.append(now - last)
            last = now
    usage = json.loads(message[len(_DATA) - 1 :] or b"{}").get("usage")
    if answer is None or not usage:
        raise aiohttp.ClientError(f"an answer ended early: {message.decode(errors='replace')}")
    answer.e2e_s = last - begun
    answer.tokens = usage["completion_tokens"]
    return answer
