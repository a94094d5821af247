"""The candidates that a tuning compares, plain vLLM and ssd with a draft, k and f; their search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import msgspec

_DEFAULTS = {"k": 7, "f": 3}  # the options' defaults; the search begins with the nearest values


@dataclass(frozen=True)
class Candidate:
    """One way to serve the target. draft: name of the draft model, None for plain vLLM."""

    draft: str | None = None
    k: int = 0
    f: int = 0

    @property
    def name(self) -> str:
        return "plain vLLM" if self.draft is None else f"{self.draft} k={self.k} f={self.f}"

    def speculative_config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Value for --speculative-config: this candidate, and the options that the user gave."""
        return {**given, "method": "ssd", "model": self.draft, "k": self.k, "f": self.f}


PLAIN = Candidate()


class Figures(msgspec.Struct):
    """Fields of the JSON of ``vllm bench serve``, under vLLM's names. ssd_hit_rate: a field that we
    add, the share of rounds whose drafts were ready at once."""

    completed: int
    output_throughput: float
    mean_tpot_ms: float
    spec_decode_acceptance_length: float = 1.0
    ssd_hit_rate: float | None = None


Outcome = Mapping[int, Figures]  # by number of clients; empty if the candidate failed


def speedup(outcome: Outcome, plain: Outcome) -> float:
    """Ratio of a candidate's tokens per second to plain vLLM's: the geometric mean over all numbers
    of clients; 0 if the candidate failed."""
    ratios = [outcome[n].output_throughput / plain[n].output_throughput for n in outcome]
    return float(prod(ratios) ** (1 / len(ratios))) if ratios else 0.0


def search(
    drafts: Sequence[str],
    ks: Sequence[int],
    fs: Sequence[int],
    most: int,
    score: Callable[[Candidate], float],
) -> None:
    """Measure every draft with one k and f, then every k, then every f, each with the best values
    so far. A full grid would need a server start for each cell. most: limit of calls of ``score``.
    score: measures a candidate; a higher result is better."""
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
