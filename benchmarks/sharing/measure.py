"""Asks servers side by side, and tells what they had per GPU."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import httpx
from msgspec.structs import replace

from benchmarks.common.markdown import table_head, table_row
from benchmarks.common.server import Server, ServerFailed
from benchmarks.serving.clients.own import OwnClient
from benchmarks.serving.clients.task import ClientFailed, Task
from benchmarks.serving.counters import Counting
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.records import Kind, Load, Speculation
from benchmarks.standin.folders import say

GIVEN = "eagle3 given "  # and the tokens of a round: names of the sides to compare with
_WARM_UP_TOKENS = 16


class Side(NamedTuple):
    """Servers whose clients ask at once. gpus: those that their tokens are divided by, 0 on
    CPUs."""

    name: str
    kind: Kind
    servers: Sequence[Server]
    gpus: int


class Row(NamedTuple):
    """What a side had under a load. speed: in tokens/s. counted: of each server."""

    load: Load
    side: str
    gpus: int
    speed: float
    counted: Sequence[Speculation]


@dataclass
class Table:
    """Rows so far, and a file that has them. about: what readers must know of them."""

    about: str
    file: Path | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Also to the file: the machine may be gone before the last."""
        self.rows.append(row)
        if self.file is not None:
            self.file.write_text(f"{self.about}\n{self.markdown()}\n")

    def markdown(self) -> str:
        """Load by load. The last columns are ratios of tokens/s per GPU."""
        given = list(dict.fromkeys(row.side for row in self.rows if row.side.startswith(GIVEN)))
        columns = ["T", "clients an engine", "side", "GPUs", "tokens/s", "tokens/s per GPU"]
        columns += ["tokens a round", "hit / miss / late", *(f"x {name}" for name in given)]
        each = {(row.load, row.side): row.speed / max(row.gpus, 1) for row in self.rows}
        loads = list(dict.fromkeys(row.load for row in self.rows))
        lines = [table_head(columns)]
        for row in sorted(self.rows, key=lambda row: loads.index(row.load)):
            load, own = row.load, each[row.load, row.side]
            cells = [f"{load.temperature:g}", str(load.concurrency), row.side, str(row.gpus or "–")]
            cells += [f"{row.speed:.1f}", f"{own:.1f}" if row.gpus else "–", *_means(row.counted)]
            bases = [each.get((load, name)) for name in given]
            cells += [f"{own / base:.2f}" if base else "–" for base in bases]
            lines.append(table_row(cells))
        return "\n".join(lines)


def _means(counted: Sequence[Speculation]) -> Iterator[str]:
    """Tokens a round and shares of rounds, of servers that had the same prompts."""
    yield f"{fmean(each.tokens_per_round for each in counted):.2f}"
    ours = [(one.hit, one.miss, one.late) for one in counted]
    shares = [[share for share in each if share is not None] for each in zip(*ours)]
    yield " / ".join(f"{fmean(each):.0%}" for each in shares if each) or "–"


@dataclass
class Measure:
    """Puts sides under loads. clients: runs the clients of each server apart. until: on the
    monotonic clock; no load begins later. failed: whether a side failed, or had no time."""

    loads: Sequence[Load]
    prompts: Prompts
    clients: Executor
    until: float
    table: Table
    failed: bool = False

    def sides(self, sides: Sequence[Side], start_s: float) -> None:
        """Put those that are healthy within `start_s` seconds one after the other under every load
        before the next one."""
        ready = [side for side in sides if self._is_ready(side, start_s)]
        for load in self.loads:
            for side in ready:
                self._run(side, load)

    def _is_ready(self, side: Side, start_s: float) -> bool:
        """Once each server has seen all prompts, so that all find them cached."""
        most = max(load.requests for load in self.loads)
        try:
            for server in side.servers:
                server.wait_healthy(max(0.0, min(start_s, self.until - time.monotonic())))
            for load in self.loads:
                if load.requests == most:
                    self._ask(side, replace(load, tokens=min(load.tokens, _WARM_UP_TOKENS)))
        except (ServerFailed, ClientFailed, httpx.TransportError) as error:
            return self._fails(side, str(error))
        say(f"{side.name}: ready")
        return True

    def _run(self, side: Side, load: Load) -> None:
        told = f"T {load.temperature:g}, {load.concurrency} clients"
        if time.monotonic() > self.until:
            self._fails(side, f"{told}: no time left")
            return
        try:
            counting = [Counting(server, side.kind) for server in side.servers]
            speed = self._ask(side, load)
            counted = [found for each in counting if (found := each.since())]
        except (ClientFailed, httpx.TransportError) as error:
            self._fails(side, f"{told}: {error}")
            return
        say(f"{side.name}: {told}: {speed:.1f} tokens/s")
        self.table.add(Row(load, side.name, side.gpus, speed, counted))

    def _fails(self, side: Side, why: str) -> bool:
        self.failed = True
        say(f"{side.name}: {why}")
        return False

    def _ask(self, side: Side, load: Load) -> float:
        """The same load on all servers at once; their tokens/s together."""
        prompts = self.prompts.take(load, 0)
        tasks = [Task(server.url, "", load, prompts, Path()) for server in side.servers]
        seen = list(self.clients.map(OwnClient().measure, tasks))
        return sum(each.tokens / each.seconds for each in seen)
