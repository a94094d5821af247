"""Clients that come and go at random, and what becomes of their requests."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.common.streaming import RequestFailed, session, stream
from benchmarks.soak.requests import (
    Choice,
    Question,
    Request,
    difference,
    malformed,
    random_request,
)

PAUSE_S = 1.0  # of a client between two requests, in the mean
MOST_FAILURES = 20  # more say nothing new


@dataclass
class Flow:
    """When tokens came. longest_gap: between two tokens of one request while another got some;
    longest_start: until a request's first token. Both in seconds."""

    tokens: int = 0
    longest_gap: float = 0.0
    longest_start: float = 0.0
    _newest: dict[int, float] = field(default_factory=dict)  # of requests that go on
    _newest_of_ended: float = 0.0
    _begun: dict[int, float] = field(default_factory=dict)

    def begin(self, request: int, now: float) -> None:
        self._begun[request] = now

    def came(self, request: int, tokens: int, now: float) -> None:
        """A request got tokens."""
        self.tokens += tokens
        before = self._newest.get(request)
        if before is None:
            self.longest_start = max(self.longest_start, now - self._begun[request])
        elif now - before > self.longest_gap:
            others = [at for other, at in self._newest.items() if other != request]
            if max([self._newest_of_ended, *others]) > before:
                self.longest_gap = now - before
        self._newest[request] = now

    def end(self, request: int) -> None:
        self._begun.pop(request)
        self._newest_of_ended = max(self._newest_of_ended, self._newest.pop(request, 0.0))


@dataclass
class Outcome:
    """failures, differences: a line for each."""

    finished: int = 0
    aborted: int = 0
    compared: int = 0
    failures: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    flow: Flow = field(default_factory=Flow)


class Clients:
    """The users of one server. A request that gets no token for `stall_limit_s` has failed."""

    def __init__(self, url: str, stall_limit_s: float):
        self.outcome = Outcome()
        self._url = url
        self._stall_limit_s = stall_limit_s
        self._ends = AsyncExitStack()
        self._count = 0

    async def __aenter__(self) -> "Clients":
        self._session = await self._ends.enter_async_context(
            session(self._url, self._stall_limit_s)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()

    async def ask_all(self, requests: Sequence[Request], at_once: int) -> list[Choice]:
        """The only answer to each; `RequestFailed` if there is none."""
        gate = asyncio.Semaphore(at_once)

        async def ask(request: Request) -> Choice:
            async with gate:
                (choice,) = await self._ask(request)
            if wrong := malformed(request, choice):
                raise RequestFailed(wrong)
            return choice

        return await asyncio.gather(*map(ask, requests))

    async def soak(
        self,
        rng: random.Random,
        questions: Sequence[Question],
        plain: Sequence[Choice],
        at_once: int,
        going: Callable[[], bool],
    ) -> None:
        """Ask at random while `going`, and wait for what was asked until then. plain: the greedy
        answers to the questions."""

        async def client(own: random.Random) -> None:
            while going() and len(self.outcome.failures) < MOST_FAILURES:
                await asyncio.sleep(own.expovariate(1 / PAUSE_S))
                request = random_request(own, questions)
                await self.follow(request, plain[request.question])

        seeds = [rng.randrange(2**32) for _ in range(at_once)]
        await asyncio.gather(*(client(random.Random(seed)) for seed in seeds))

    async def follow(self, request: Request, plain: Choice) -> None:
        """Ask once, and note in `outcome` what is to be said of the answer."""
        outcome = self.outcome
        try:
            choices = await self._ask(request)
        except (aiohttp.ClientError, RequestFailed) as error:
            stalled = isinstance(error, TimeoutError)
            said = f"no token for {self._stall_limit_s:g} s" if stalled else repr(error)
            settings = {name: v for name, v in request.body.items() if name != "prompt"}
            outcome.failures.append(f"question {request.question} {settings}: {said}")
            return
        if request.cut is not None and not all(choice.finish for choice in choices):
            outcome.aborted += 1
        else:
            outcome.finished += 1
            wrong = (malformed(request, choice) for choice in choices)
            outcome.failures += [f"question {request.question}: {text}" for text in wrong if text]
        if request.greedy:
            outcome.compared += sum(bool(choice.tokens) for choice in choices)
            found = (difference(request, choice, plain) for choice in choices)
            outcome.differences += [text for text in found if text]

    async def _ask(self, request: Request) -> list[Choice]:
        """The answers, as far as the client stays to hear them."""
        self._count += 1
        number, flow = self._count, self.outcome.flow
        choices = [Choice() for _ in range(request.body.get("n", 1))]
        flow.begin(number, time.monotonic())
        try:
            if request.cut == 0:
                async with self._session.post("/v1/completions", json=request.body):
                    pass
            else:
                await self._hear(request, number, choices)
        finally:
            flow.end(number)
        return choices

    async def _hear(self, request: Request, number: int, choices: list[Choice]) -> None:
        heard = 0
        async with aclosing(stream(self._session, request.body)) as messages:
            async for message in messages:
                event = json.loads(message)
                if "error" in event:
                    raise RequestFailed(str(event["error"]))
                for piece in event["choices"]:
                    tokens = _take(choices[piece["index"]], piece)
                    if tokens:
                        heard += tokens
                        self.outcome.flow.came(number, tokens, time.monotonic())
                if request.cut is not None and heard >= request.cut:
                    break


def _take(choice: Choice, piece: dict[str, Any]) -> int:
    """Add a piece to its choice; the number of new tokens."""
    tokens = piece["token_ids"] or []
    choice.text += piece["text"]
    choice.tokens += tokens
    choice.finish = piece["finish_reason"] or choice.finish
    if piece.get("logprobs"):
        tops = (sorted(top.values())[-2:] for top in piece["logprobs"]["top_logprobs"])
        choice.margins += [top[-1] - top[0] for top in tops]
    return len(tokens)
