"""Clients of a server in a closed loop: each asks its next question when its answer is complete."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles

import aiohttp
import msgspec

from benchmarks.common.server import NAME

_LIMIT_S = 600.0  # of an answer
_DATA = b"data: {"


class Figures(msgspec.Struct, frozen=True):
    """What a number of clients saw together. tokens_s: output tokens a second; ttft_ms: time to the
    first token in milliseconds, 50th and 99th percentile; gap_ms: an answer's longest time between
    two tokens in milliseconds, median and maximum."""

    clients: int
    temperature: float
    requests: int
    tokens_s: float
    ttft_ms: tuple[float, float]
    gap_ms: tuple[float, float]


@dataclass
class _Answer:
    """Seconds to its first token and between two later ones, at most; its number of tokens."""

    ttft_s: float
    gap_s: float
    tokens: int


def load(
    url: str,
    prompts: Sequence[list[int]],
    clients: int,
    requests: int,
    tokens: int,
    temperature: float,
) -> Figures:
    """Ask ``requests`` questions, token ids taken in turn from ``prompts``, ``clients`` at a time;
    every answer has ``tokens`` tokens. ``aiohttp.ClientError`` if the server fails one."""
    started = time.monotonic()
    answers = asyncio.run(_all(url, prompts, clients, requests, tokens, temperature))
    seconds = time.monotonic() - started
    ttfts = sorted(1000 * answer.ttft_s for answer in answers)
    gaps = sorted(1000 * answer.gap_s for answer in answers)
    return Figures(
        clients=clients,
        temperature=temperature,
        requests=requests,
        tokens_s=sum(answer.tokens for answer in answers) / seconds,
        ttft_ms=(_percentile(ttfts, 50), _percentile(ttfts, 99)),
        gap_ms=(_percentile(gaps, 50), gaps[-1]),
    )


async def _all(
    url: str,
    prompts: Sequence[list[int]],
    clients: int,
    requests: int,
    tokens: int,
    temperature: float,
) -> list[_Answer]:
    numbers = iter(range(requests))
    answers: list[_Answer] = []
    timeout = aiohttp.ClientTimeout(total=_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def client(numbers: Iterator[int]) -> None:
            for number in numbers:  # shared by all clients
                body = {
                    "model": NAME,
                    "prompt": prompts[number % len(prompts)],
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "temperature": temperature,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                answers.append(await _ask(session, body))

        await asyncio.gather(*(client(numbers) for _ in range(clients)))
    return answers


async def _ask(session: aiohttp.ClientSession, body: dict[str, object]) -> _Answer:
    begun = last = time.monotonic()
    ttft_s = gap_s = 0.0
    usage = b""
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"the server refused a request: {await response.text()}")
        async for line in response.content:
            if not line.startswith(_DATA):
                continue
            now = time.monotonic()
            if not ttft_s:
                ttft_s = now - begun
            elif usage:  # what came before was no usage yet
                gap_s = max(gap_s, now - last)
            usage, last = line, now
    found = json.loads(usage[len(_DATA) - 1 :])
    if not found.get("usage"):
        raise aiohttp.ClientError(f"an answer ended early: {usage.decode(errors='replace')}")
    return _Answer(ttft_s, gap_s, found["usage"]["completion_tokens"])


def _percentile(ordered: Sequence[float], percent: int) -> float:
    if len(ordered) == 1:
        return ordered[0]
    return quantiles(ordered, n=100, method="inclusive")[percent - 1]
