"""What is compared: plain vLLM, and ssd with a draft, k and f."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import msgspec

_DEFAULTS = {"k": 7, "f": 3}  # of the options: the search begins as near to them as it can


@dataclass(frozen=True)
class Candidate:
    """One way to serve. draft: None for plain vLLM."""

    draft: str | None = None
    k: int = 0
    f: int = 0

    @property
    def name(self) -> str:
        return "plain vLLM" if self.draft is None else f"{self.draft} k={self.k} f={self.f}"

    def speculative_config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """For --speculative-config, with the options that the user has ``given``."""
        return {**given, "method": "ssd", "model": self.draft, "k": self.k, "f": self.f}


PLAIN = Candidate()


class Figures(msgspec.Struct):
    """What we read in the JSON of ``vllm bench serve``, by vLLM's names. ssd_hit_rate: our addition
    to it, the share of rounds whose drafts were ready at once."""

    completed: int
    output_throughput: float
    mean_tpot_ms: float
    spec_decode_acceptance_length: float = 1.0
    ssd_hit_rate: float | None = None


Outcome = Mapping[int, Figures]  # by number of clients; empty for a candidate that failed


def speedup(outcome: Outcome, plain: Outcome) -> float:
    """Tokens per second as a multiple of plain vLLM's: the geometric mean over all numbers of
    clients, or 0 for a candidate that failed."""
    ratios = [outcome[n].output_throughput / plain[n].output_throughput for n in outcome]
    return float(prod(ratios) ** (1 / len(ratios))) if ratios else 0.0


def search(
    drafts: Sequence[str],
    ks: Sequence[int],
    fs: Sequence[int],
    most: int,
    score: Callable[[Candidate], float],
) -> None:
    """Measure every draft at one k and f, then every k, then every f, each with the best values so
    far. A full grid would cost a server start for each cell. most: the limit of calls of ``score``,
    which measures a candidate; higher is better."""
    by_name: dict[str, Sequence[Any]] = {
        "draft": drafts,
        "k": sorted(ks, key=lambda k: abs(k - _DEFAULTS["k"])),
        "f": sorted(fs, key=lambda f: abs(f - _DEFAULTS["f"])),
    }
    best = Candidate(*(values[0] for values in by_name.values()))
    scores: dict[Candidate, float] = {}
    for name, values in by_name.items():
        for value in values:
            candidate = replace(best, **{name: value})
            if candidate not in scores and len(scores) < most:
                scores[candidate] = score(candidate)
        best = max(scores, key=lambda candidate: scores[candidate])
