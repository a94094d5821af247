"""The candidates that a tuning compares, plain vLLM and ssd with a draft, k and f; the choice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vllm_ssd.config.default_drafts import default_k_and_f

_WORTH_IT = 1.03  # least ratio to plain vLLM: below it, a draft's device has better uses


@dataclass(frozen=True)
class Candidate:
    """One way to serve the target. draft: name of the draft model, None for plain vLLM."""

    draft: str | None = None
    k: int = 0
    f: int = 0

    @property
    def name(self) -> str:
        return "plain vLLM" if self.draft is None else f"{self.draft} k={self.k} f={self.f}"

    def speculative_config(self, given: Mapping[str, Any]) -> str | None:
        """Value for --speculative-config: this candidate, and the options that the user gave."""
        ours = {"method": "ssd", "model": self.draft, "k": self.k, "f": self.f}
        return None if self.draft is None else json.dumps({**given, **ours})


PLAIN = Candidate()

# What ``vllm bench serve`` saves, by number of clients; empty if the candidate failed.
Outcome = Mapping[int, Mapping[str, Any]]


def speedup(outcome: Outcome, plain: Outcome) -> float:
    """Ratio of a candidate's tokens per second to plain vLLM's: the geometric mean over all numbers
    of clients; 0 if the candidate failed."""
    ratios = [outcome[n]["output_throughput"] / plain[n]["output_throughput"] for n in outcome]
    return prod(ratios) ** (1 / len(ratios)) if ratios else 0.0


def search(
    drafts: Sequence[str], ks: Sequence[int], fs: Sequence[int], score: Callable[[Candidate], float]
) -> None:
    """Measure every draft with one k and f, then every k, then every f, each with the best values
    so far, and begin near the defaults. A full grid would need a server start for each cell.
    score: measures a candidate, or knows it; a higher result is better."""
    from vllm.platforms import current_platform

    usual_k, usual_f = default_k_and_f(None, None, current_platform.is_cpu())
    ks = sorted(ks, key=lambda k: abs(k - usual_k))
    fs = sorted(fs, key=lambda f: abs(f - usual_f))
    draft = max(drafts, key=lambda draft: score(Candidate(draft, ks[0], fs[0])))
    k = max(ks, key=lambda k: score(Candidate(draft, k, fs[0])))
    for f in fs:
        score(Candidate(draft, k, f))


def report(outcomes: Mapping[Candidate, Outcome], given: Mapping[str, Any]) -> str:
    """A table with the best candidate first, then a sentence with the advice. given: further
    options of --speculative-config."""
    plain = outcomes[PLAIN]
    ranked = sorted(outcomes, key=lambda each: -speedup(outcomes[each], plain))
    width = max(len(candidate.name) for candidate in ranked)
    lines = [f"{'':<{width}}  clients  tokens/s  x plain  tokens/round  ms/token"]
    for candidate in ranked:
        for clients, figures in outcomes[candidate].items():
            rate, token_ms = figures["output_throughput"], figures["mean_tpot_ms"]
            times = rate / plain[clients]["output_throughput"]
            length = figures.get("spec_decode_acceptance_length", 1.0)
            cells = f"{clients:>7}  {rate:>8.1f}  {times:>7.2f}  {length:>12.2f}  {token_ms:>8.1f}"
            lines.append(f"{candidate.name:<{width}}  {cells}")
    best = next((each for each in ranked if each != PLAIN), PLAIN)
    gain = speedup(outcomes[best], plain)
    answer = "Leave ssd off: no candidate could be measured; the steps above say why."
    if gain >= _WORTH_IT:
        options = best.speculative_config(given)
        answer = f"Use this, {gain:.2f} times plain vLLM: --speculative-config '{options}'"
    elif gain:
        answer = f"Leave ssd off: {best.name}, the best, is {gain:.2f} times plain vLLM."
    return "\n".join([*lines, "", answer])
