"""Puts servers under loads."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import httpx
from msgspec.structs import replace

from benchmarks.common.server import Server, ServerFailed
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.clients.client import ClientFailed, Task
from benchmarks.serving.counters import Counting
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.records import Load, Result, Run, Side
from benchmarks.serving.table import speed
from benchmarks.serving.timeline import record
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
    """What every side is measured with. tokenizer: the target's folder or hub name. bounds: as
    `records.Saved` has them. start_s: seconds that a server may take to start. timeline: whether
    one more request of each side of ours is watched."""

    clients: Sequence[str]
    loads: Sequence[Load]
    prompts: Prompts
    tokenizer: str
    bounds: dict[str, float]
    start_s: float
    timeline: bool = False

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
            for subject in subjects:
                with subject.attempt():
                    if self.timeline and not subject.failed:
                        self._watch(subject, first)
        yield [subject.result for subject in subjects]

    def _run(self, subject: _Subject, client: str, load: Load, first: int) -> Run:
        server, side = subject.server, subject.side
        counting = Counting(server, side.kind)
        with tempfile.TemporaryDirectory() as scratch:
            prompts = self.prompts.take(load, first)
            seen = CLIENTS[client].measure(
                Task(server.url, self.tokenizer, load, prompts, self.bounds, Path(scratch))
            )
        run = Run(client, load, seen, counting.since())
        say(f"{side.name}: {_words(load)}, {client}: {speed(run):.1f} tokens/s")
        return run

    def _watch(self, subject: _Subject, first: int) -> None:
        """One more request, with all that target and draft do meanwhile, if the side is ours."""
        run_dir = subject.server.run_dir()
        if run_dir is not None:
            load = replace(self.loads[0], requests=1, concurrency=1, rate=None)
            ask = partial(self._ask, subject.server, load, first)
            subject.result.timeline = record(run_dir, ask)

    def _warm_up(self, server: Server) -> None:
        """As many at a time as there will be, so that nothing is compiled while it is measured."""
        most = max(self.loads, key=lambda load: load.concurrency or load.requests)
        places = min(most.concurrency or most.requests, _WARM_UP_REQUESTS)
        tokens = min(most.tokens, _WARM_UP_TOKENS)
        load = replace(most, requests=places, concurrency=places, rate=None, tokens=tokens)
        self._ask(server, load, 0)

    def _ask(self, server: Server, load: Load, first: int) -> None:
        """A load that is not measured."""
        prompts = self.prompts.take(load, first)
        with tempfile.TemporaryDirectory() as scratch:
            task = Task(server.url, self.tokenizer, load, prompts, {}, Path(scratch))
            CLIENTS["own"].measure(task)


def _words(load: Load) -> str:
    """What distinguishes a load."""
    parts = [load.dataset]
    if load.prompt_tokens is not None:
        parts.append(f"prompts of {load.prompt_tokens}")
    if load.temperature:
        parts.append(f"T {load.temperature:g}")
    if load.rate is not None:
        parts.append(f"{load.rate:g} requests/s")
    parts.append(f"{load.concurrency or 'any number of'} clients")
    return ", ".join(parts)
