"""What every client of a server is given, and how it sums up what it saw."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.serving.records import Load, Seen, Spread


@dataclass(frozen=True)
class Task:
    """A load on the server at a URL. tokenizer: folder or hub name of the target. prompts: a text
    for each request, the chat template included. bounds: as `records.Saved` has them. scratch: an
    empty folder for files."""

    url: str
    tokenizer: str
    load: Load
    prompts: Sequence[str]
    bounds: dict[str, float]
    scratch: Path


class Client(Protocol):
    """A program that puts a server under load."""

    # The longest prompt that it takes, in tokens, where a data set has lengths of its own.
    longest_prompt: int | None

    def check(self) -> None:
        """Whether it can run here: `ValueError` with a sentence if not."""

    def measure(self, task: Task) -> Seen:
        """Run a load. `ClientFailed` if a request fails."""


class ClientFailed(Exception):
    """The client failed, or the server failed it; with the last words."""


@dataclass
class Answer:
    """Seconds of one answer: to its first token, from each message with tokens to the next, and
    all in all; its number of tokens."""

    ttft_s: float
    itls_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    tokens: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None without such."""
        return (self.e2e_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None

    def keeps(self, bounds: dict[str, float]) -> bool:
        """Whether it took at most as many milliseconds as the bounds say."""
        taken = {"ttft": self.ttft_s, "tpot": self.tpot_s or 0.0, "e2el": self.e2e_s}
        return all(1000 * taken[name] <= limit for name, limit in bounds.items())


def sum_up(answers: Sequence[Answer], seconds: float, bounds: dict[str, float]) -> Seen:
    """What ``answers``, one at least, tell, which took ``seconds`` together."""
    itls = [itl for answer in answers for itl in answer.itls_s]
    return Seen(
        completed=len(answers),
        seconds=seconds,
        tokens=sum(answer.tokens for answer in answers),
        e2e=spread([answer.e2e_s for answer in answers]),
        ttft=spread([answer.ttft_s for answer in answers]),
        itl=spread(itls),
        tpot=spread([answer.tpot_s for answer in answers if answer.tpot_s is not None]),
        gap=spread([max(answer.itls_s, default=0.0) for answer in answers]),
        good=sum(answer.keeps(bounds) for answer in answers) / seconds if bounds else None,
        ttfts_ms=[round(1000 * answer.ttft_s, 3) for answer in answers],
        itls_ms=[round(1000 * itl, 3) for itl in itls],
    )


def spread(seconds: Sequence[float]) -> Spread:
    """Of times in seconds; zeros if there are none."""
    times = 1000 * np.asarray(seconds or [0.0])
    p50, p99 = np.percentile(times, (50, 99))
    return Spread(float(times.mean()), float(p50), float(p99))
