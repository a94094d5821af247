"""One of the two engines that are compared: its process and its turns."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

from benchmarks.common.running import processes_of
from examples.demo import engine
from examples.demo.busy import look, taken
from examples.demo.engine import EngineSpec, Event, Finished, Piece, Ready


class EngineFailed(Exception):
    """An engine's process ended before all was answered; with its last words."""


@dataclass
class Turn:
    """One question, answered. taken: the share of the cores' time that other programs had, 0..1."""

    pieces: list[Piece] = field(default_factory=list)
    counters: dict[str, Any] | None = None
    taken: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def tokens(self) -> int:
        """Tokens of decoding: all after the first piece, which is the prefill's."""
        return sum(len(piece.token_ids) for piece in self.pieces[1:])

    @property
    def rounds(self) -> int:
        """Rounds of decoding: each brings a piece."""
        return max(len(self.pieces) - 1, 0)

    @property
    def seconds(self) -> float:
        """Of decoding."""
        return self.pieces[-1].at - self.pieces[0].at if self.pieces else 0.0


class Side:
    """An engine in a process of its own, which idles between its turns. A context manager: the
    process, and the engine's memory with it, is gone at the end."""

    def __init__(
        self, spec: EngineSpec, questions: Sequence[str], max_tokens: int, cores: Sequence[int]
    ):
        self._spec = spec
        self._cores = cores
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(
            target=engine.run, args=(spec, questions, max_tokens, theirs), name="engine"
        )
        self._process.start()
        theirs.close()  # or the end of the process would not be the end of the channel
        self._ready: Ready | None = None

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()  # if this is too early for the engine, it ends all the same
        self._process.join()

    def wait_ready(self) -> None:
        """Until the engine has started; ``EngineFailed`` if it does not."""
        event = self._receive()
        assert isinstance(event, Ready)
        self._ready = event

    def take_turn(self, question: int, show: Callable[[Piece], None]) -> Turn:
        """Answer a question and show every piece. Raises ``EngineFailed``."""
        turn = Turn()
        before = look(self._cores, self._processes)
        self._channel.send(question)
        for event in self._until_finished():
            match event:
                case Piece():
                    turn.pieces.append(event)
                    show(event)
                case Finished(counters):
                    turn.counters = counters
        after = look(self._cores, self._processes)
        turn.taken = taken(before, after, len(self._cores))
        return turn

    def _until_finished(self) -> Iterator[Event]:
        while True:
            event = self._receive()
            yield event
            if isinstance(event, Finished):
                return

    def _receive(self) -> Event:
        channel: Connection = self._channel
        try:
            event: Event = channel.recv()
            return event
        except EOFError:
            tail = "\n".join(self._spec.log.read_text(errors="replace").splitlines()[-30:])
            raise EngineFailed(
                f"\n{tail}\n\nThe engine failed; all it said is in {self._spec.log}"
            ) from None

    def _processes(self) -> list[psutil.Process]:
        """The demo's own, its engine's, and those of a draft, which are nobody's children."""
        own = psutil.Process()
        found = {process.pid: process for process in [own, *own.children(recursive=True)]}
        if self._ready is not None and self._ready.run_dir is not None:
            found |= {process.pid: process for process in processes_of(self._ready.run_dir)}
        return list(found.values())
