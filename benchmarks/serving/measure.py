"""Measures one server after the other."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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

    def side(self, side: Side, log: Path) -> Result:
        """Start a server, put it under all loads, and end it; what failed is in the result."""
        result = Result(side)
        server = Server(side.engine, log, side.environment)
        try:
            server.wait_healthy(self.start_s)
            say(f"{side.name}: server is up")
            self._warm_up(server)
            # Where a load's prompts begin in its data set.
            first = 0
            for load in self.loads:
                for client in self.clients:
                    result.runs.append(self._run(side, server, client, load, first))
                first += load.requests
            run_dir = server.run_dir()
            if self.timeline and run_dir is not None:
                result.timeline = record(run_dir, lambda: self._ask_one(server, first))
        except (ServerFailed, ClientFailed, httpx.TransportError) as error:
            result.error = str(error)
            say(f"{side.name} failed; its log is {log}")
        finally:
            if server.process.poll() is None:
                server.end()
        return result

    def _run(self, side: Side, server: Server, client: str, load: Load, first: int) -> Run:
        counting = Counting(server, side.kind)
        with tempfile.TemporaryDirectory() as scratch:
            prompts = self.prompts.take(load, first)
            seen = CLIENTS[client].measure(
                Task(server.url, self.tokenizer, load, prompts, self.bounds, Path(scratch))
            )
        run = Run(client, load, seen, counting.since())
        say(f"{side.name}: {_words(load)}, {client}: {speed(run):.1f} tokens/s")
        return run

    def _ask_one(self, server: Server, first: int) -> None:
        load = replace(self.loads[0], requests=1, concurrency=1, rate=None)
        self._ask(server, load, first)

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
