"""Puts servers under loads."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from msgspec.structs import astuple, replace

from benchmarks.common.server import Server, ServerFailed
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.clients.task import ClientFailed, Task
from benchmarks.serving.counters import Counting
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.records import Load, Result, Run, Seen, Side, Speculation
from benchmarks.serving.table import speed
from benchmarks.standin.folders import say

_WARM_UP_TOKENS = 16
_WARM_UP_REQUESTS = 256  # at most


class Started:
    """A side, its servers, which start by themselves and whose clients all ask at once, and what
    was measured of them until one failed."""

    def __init__(self, side: Side, servers: Sequence[Server]):
        self.side, self.servers = side, servers
        self.result = Result(side)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What fails within is in the result."""
        try:
            yield
        except (ServerFailed, ClientFailed, httpx.TransportError) as error:
            self.result.error = str(error)
            say(f"{self.side.name} failed; its log is {self.servers[0].log}")

    @property
    def failed(self) -> bool:
        return self.result.error is not None


@dataclass(frozen=True)
class Measure:
    """What every side is measured with. tokenizer: the target's folder or hub name. start_s:
    seconds that a server may take to start. until: on the monotonic clock; no load begins later.
    same_prompts: each load begins with the same ones, which all servers know beforehand. map: asks
    the servers of one side, all at once if there are several."""

    clients: Sequence[str]
    loads: Sequence[Load]
    prompts: Prompts
    tokenizer: str
    start_s: float
    until: float = float("inf")
    same_prompts: bool = False
    map: Callable[[Callable[[Task], Seen], Sequence[Task]], Any] = map

    def sides(self, sides: Sequence[Side], logs: Sequence[Path]) -> Iterator[list[Result]]:
        """Start the servers of all these sides, put one after the other under every load before
        the next load, and end them. Yields after every load all that is known by then."""
        with ExitStack() as running:
            subjects = []
            for side, log in zip(sides, logs):
                server = running.enter_context(Server(side.engine, log, side.environment))
                subjects.append(Started(side, [server]))
            yield from self.started(subjects)

    def started(self, subjects: Sequence[Started]) -> Iterator[list[Result]]:
        """Those that have been started, in the same way."""
        for subject in subjects:
            with subject.attempt():
                for server in subject.servers:
                    server.wait_healthy(max(0.0, min(self.start_s, self.until - time.monotonic())))
                say(f"{subject.side.name}: up")
                self._warm_up(subject)
        # Where a load's prompts begin in its data set.
        first = 0
        for load in self.loads:
            for client, subject in product(self.clients, subjects):
                with subject.attempt():
                    if not subject.failed:
                        subject.result.runs.append(self._run(subject, client, load, first))
            first += 0 if self.same_prompts else load.requests
            yield [subject.result for subject in subjects]

    def _run(self, subject: Started, client: str, load: Load, first: int) -> Run:
        side = subject.side
        if time.monotonic() > self.until:
            raise ClientFailed(f"no time left for {_words(load)}")
        counting = [Counting(server, side.kind) for server in subject.servers]
        seen = _together(self._ask(subject, client, load, first))
        run = Run(client, load, seen, _mean([each.since() for each in counting]))
        say(f"{side.name}: {_words(load)}, {client}: {speed(run):.1f} tokens/s")
        return run

    def _warm_up(self, subject: Started) -> None:
        """Send requests at the loads' highest concurrency, up to ``_WARM_UP_REQUESTS``, so that
        nothing is compiled while it is measured. Unless ``same_prompts``, they have prompts that no
        load has, if the data set has enough."""
        most = max(self.loads, key=lambda load: load.concurrency or load.requests)
        places = min(most.concurrency or most.requests, _WARM_UP_REQUESTS)
        requests = most.requests if self.same_prompts else places
        first = 0 if self.same_prompts else sum(load.requests for load in self.loads)
        tokens = min(most.tokens, _WARM_UP_TOKENS)
        load = replace(most, requests=requests, concurrency=places, tokens=tokens)
        for temperature in sorted({load.temperature for load in self.loads}):
            self._ask(subject, "own", replace(load, temperature=temperature), first)

    def _ask(self, subject: Started, client: str, load: Load, first: int) -> list[Seen]:
        prompts = self.prompts.take(load, first)
        with tempfile.TemporaryDirectory() as scratch:
            given = self.tokenizer, load, prompts, Path(scratch)
            tasks = [Task(server.url, *given) for server in subject.servers]
            return list(self.map(CLIENTS[client].measure, tasks))


def _together(seen: Sequence[Seen]) -> Seen:
    """Of several servers with the same prompts: tokens a second are the sum of theirs, each with
    its own seconds; times and texts are those of the first."""
    tokens = sum(one.tokens for one in seen)
    seconds = tokens / sum(one.tokens / one.seconds for one in seen)
    completed = sum(one.completed for one in seen)
    return replace(seen[0], completed=completed, seconds=seconds, tokens=tokens)


def _mean(counted: Sequence[Speculation | None]) -> Speculation | None:
    """Of several servers with the same prompts."""
    told = zip(*(astuple(one) for one in counted if one is not None))
    figures: list[Any] = [None if None in each else fmean(each) for each in told]
    return Speculation(*figures) if figures else None


def _words(load: Load) -> str:
    """What distinguishes a load."""
    parts = [load.dataset]
    if load.prompt_tokens is not None:
        parts.append(f"prompts of {load.prompt_tokens}")
    if load.temperature:
        parts.append(f"T {load.temperature:g}")
    parts.append(f"{load.concurrency or 'any number of'} clients")
    return ", ".join(parts)
