"""Clients that ask again and again, and compare what they are told."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from transformers import AutoTokenizer

from benchmarks.soak.load import Clients, Outcome
from benchmarks.soak.requests import (
    Choice,
    Question,
    Request,
    difference,
    greedy_request,
    make_questions,
)
from tests.support.greedy_texts import tiny_answers
from tests.support.harness import START_S, wait_for

STALL_S = 60.0  # without a token, after which a request has failed; a hang lasts longer


class Load:
    """``at_once`` streamed requests at all times: each that ends is compared with the plain answer,
    and asked again. The other questions are for ``ask_another``."""

    def __init__(
        self, url: str, at_once: int, questions: Sequence[Question], plain: Sequence[Choice]
    ):
        requests = [greedy_request(*numbered) for numbered in enumerate(questions)]
        self._url = url
        self._asked = list(zip(requests, plain))[:at_once]
        self._others = cycle(list(zip(requests, plain))[at_once:])
        self._clients = Clients(url, STALL_S)
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self.outcome = self._clients.outcome

    @contextmanager
    def running(self) -> Iterator[None]:
        """Meanwhile; at the end all that was asked is answered."""
        with self._pool as pool:
            streams = pool.submit(lambda: asyncio.run(self._stream_all()))
            try:
                yield
            finally:
                self._ended.set()
                streams.result()

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """The first true value of ``condition``; an assertion if a request fails before."""

        def looked_at() -> Any:
            self.check()
            return condition()

        return wait_for(what, looked_at, START_S)

    def check(self) -> None:
        """So far no request has failed or stalled, and no text was another than the plain one."""
        found = self.outcome.failures + self.outcome.differences
        assert not found, found

    def ask_another(self) -> Future[None]:
        """One more request beside the others, which ends by itself."""
        request, plain = next(self._others)

        async def ask() -> None:
            async with Clients(self._url, STALL_S) as clients:
                (choice,) = await clients.ask_all([request], 1)
            assert difference(request, choice, plain) is None

        return self._pool.submit(lambda: asyncio.run(ask()))

    async def _stream_all(self) -> None:
        async with self._clients:
            await asyncio.gather(*(self._stream(*asked) for asked in self._asked))

    async def _stream(self, request: Request, plain: Choice) -> None:
        while not (self._ended.is_set() or self.outcome.failures):
            await self._clients.follow(request, plain)


async def soak(url: str, another: str, target: str) -> Outcome:
    """Ask the server at `url` at random, as a soak does, until it has ended, aborted and compared
    some. The plain texts come from `another` server; their tokens are the target's own."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    questions = make_questions(tokenizer, 0, count=8, prompt_tokens=128, tokens=32, longest=256)
    own = tiny_answers(target, [question.prompt for question in questions], 32)
    whole = [greedy_request(*numbered) for numbered in enumerate(questions)]
    async with Clients(another, STALL_S) as others:
        plain = await others.ask_all(whole, 4)
    assert [choice.tokens for choice in plain] == [choice.tokens for choice in own]

    async with Clients(url, STALL_S) as clients:
        seen = clients.outcome

        def going() -> bool:
            return seen.compared < 6 or not (seen.finished and seen.aborted)

        await clients.soak(random.Random(0), questions, plain, 4, going)
    return seen
