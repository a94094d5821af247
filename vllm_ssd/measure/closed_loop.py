"""A closed loop: the number of running requests is the batch size until no new ones are left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Counters = dict[str, Any]


@dataclass
class Window:
    """What happened while the batch was full. tokens: of output, in ``seconds``. A round is one
    request's part of an engine step, but for the step that yields its first token; round_tokens are
    of these. steps, step_seconds: engine steps in which every request decoded. texts: all token ids
    of each request. before, after: what the engine had counted when it began and when it ended;
    None if it never did."""

    texts: list[list[int]]
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    before: Counters | None = None
    after: Counters | None = None


@dataclass
class ClosedLoop:
    """Drives vLLM's `LLMEngine`, or what has its `add_request` and `step`.

    sampling: parameters of a request, by its number; outputs must be deltas. read_counters: asked
    at the beginning and at the end of the time that is measured.
    """

    engine: Any
    batch: int
    sampling: Callable[[int], Any]
    read_counters: Callable[[], Counters]
    _running: dict[str, int] = field(default_factory=dict)

    def run(self, prompts: Sequence[list[int]], name: str) -> Window:
        """Have all prompts (token ids) answered by requests called NAME-0, NAME-1, ..

        Measured is from the step in which the first batch has got its first tokens to the one
        after which a place in the batch stays empty.
        """
        waiting = deque(enumerate(prompts))
        window: Window = Window([[] for _ in prompts])
        self._refill(waiting, name)
        last = began = time.perf_counter()
        while self._running:
            new = self._step(window.texts)
            now = time.perf_counter()
            if window.before is not None and window.after is None:
                self._count(window, new, now - last)
            last = now
            self._refill(waiting, name)
            full = len(self._running) == self.batch
            if window.before is None:
                if full and all(window.texts[number] for number in self._running.values()):
                    window.before = self.read_counters()
                    last = began = time.perf_counter()
            elif window.after is None and not full:
                window.after = self.read_counters()
                window.seconds = now - began
        return window

    def _refill(self, waiting: deque[tuple[int, list[int]]], name: str) -> None:
        while waiting and len(self._running) < self.batch:
            number, prompt = waiting.popleft()
            request = f"{name}-{number}"
            parameters = self.sampling(number)
            self.engine.add_request(request, {"prompt_token_ids": prompt}, parameters)
            self._running[request] = number

    def _step(self, texts: list[list[int]]) -> dict[int, tuple[int, bool]]:
        """One engine step. Returns (new tokens, whether they are its first) by request number, and
        appends the tokens to the texts."""
        new = {}
        for output in self.engine.step():
            number = self._running[output.request_id]
            tokens = output.outputs[0].token_ids
            if tokens:
                new[number] = len(tokens), not texts[number]
                texts[number] += tokens
            if output.finished:
                del self._running[output.request_id]
        return new

    def _count(self, window: Window, new: dict[int, tuple[int, bool]], seconds: float) -> None:
        decoded = [count for count, first in new.values() if not first]
        window.tokens += sum(count for count, _ in new.values())
        window.rounds += len(decoded)
        window.round_tokens += sum(decoded)
        if len(decoded) == self.batch:
            window.steps += 1
            window.step_seconds += seconds
