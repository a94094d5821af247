"""Puts servers under loads."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import httpx
from msgspec.structs import replace

from benchmarks.common.server import Server, ServerFailed
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.clients.task import ClientFailed, Task
from benchmarks.serving.counters import Counting
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.records import Load, Result, Run, Seen, Side
from benchmarks.serving.table import speed
from benchmarks.standin.folders import say

_WARM_UP_TOKENS = 16
_WARM_UP_REQUESTS = 256  # at most


class _Subject:
    """A side, its server, which starts at once, and what was measured of it until it failed."""

    def __init__(self, side: Side, log: Path):
        self.side = side
        self.result = Result(side)
        self.server = Server(side.engine, log, side.environment)
        self._log = log

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What fails within is in the result."""
        try:
            yield
        except (ServerFailed, ClientFailed, httpx.TransportError) as error:
            self.result.error = str(error)
            say(f"{self.side.name} failed; its log is {self._log}")

    @property
    def failed(self) -> bool:
        return self.result.error is not None

    def end(self) -> None:
        if self.server.process.poll() is None:
            self.server.end()


@dataclass(frozen=True)
class Measure:
    """What every side is measured with. tokenizer: the target's folder or hub name. start_s:
    seconds that a server may take to start."""

    clients: Sequence[str]
    loads: Sequence[Load]
    prompts: Prompts
    tokenizer: str
    start_s: float

    def sides(self, sides: Sequence[Side], logs: Sequence[Path]) -> Iterator[list[Result]]:
        """Start the servers of all these sides, put one after the other under every load before
        the next load, and end them. Yields after every load all that is known by then."""
        with ExitStack() as running:
            subjects = []
            for side, log in zip(sides, logs):
                subjects.append(_Subject(side, log))
                running.callback(subjects[-1].end)
            for subject in subjects:
                with subject.attempt():
                    subject.server.wait_healthy(self.start_s)
                    say(f"{subject.side.name}: server is up")
                    self._warm_up(subject.server)
            # Where a load's prompts begin in its data set.
            first = 0
            for load in self.loads:
                for client, subject in product(self.clients, subjects):
                    with subject.attempt():
                        if not subject.failed:
                            subject.result.runs.append(self._run(subject, client, load, first))
                first += load.requests
                yield [subject.result for subject in subjects]

    def _run(self, subject: _Subject, client: str, load: Load, first: int) -> Run:
        server, side = subject.server, subject.side
        counting = Counting(server, side.kind)
        seen = self._ask(server, client, load, first)
        run = Run(client, load, seen, counting.since())
        say(f"{side.name}: {_words(load)}, {client}: {speed(run):.1f} tokens/s")
        return run

    def _warm_up(self, server: Server) -> None:
        """As many at a time as there will be, so that nothing is compiled while it is measured."""
        most = max(self.loads, key=lambda load: load.concurrency or load.requests)
        places = min(most.concurrency or most.requests, _WARM_UP_REQUESTS)
        tokens = min(most.tokens, _WARM_UP_TOKENS)
        load = replace(most, requests=places, concurrency=places, tokens=tokens)
        self._ask(server, "own", load, 0)

    def _ask(self, server: Server, client: str, load: Load, first: int) -> Seen:
        prompts = self.prompts.take(load, first)
        with tempfile.TemporaryDirectory() as scratch:
            task = Task(server.url, self.tokenizer, load, prompts, Path(scratch))
            return CLIENTS[client].measure(task)


def _words(load: Load) -> str:
    """What distinguishes a load."""
    parts = [load.dataset]
    if load.prompt_tokens is not None:
        parts.append(f"prompts of {load.prompt_tokens}")
    if load.temperature:
        parts.append(f"T {load.temperature:g}")
    parts.append(f"{load.concurrency or 'any number of'} clients")
    return ", ".join(parts)
