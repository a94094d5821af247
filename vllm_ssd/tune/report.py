"""What a tuning ends with: a table of all candidates, the one to use, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ssd.tune.records import PLAIN, Figures, Outcome, speedup

# Times plain vLLM: below, a draft's device has better uses.
WORTH_IT = 1.03
_FIGURES = ("tokens/s", "x plain", "tokens/round", "ms/round", "hit")


def report(outcomes: Sequence[Outcome], given: Mapping[str, Any], names: str) -> str:
    """A markdown table, the best first, then the answer. outcomes: plain vLLM's among them. given:
    further options of --speculative-config. names: of what was served, "TARGET on MACHINE"."""
    plain = plain_of(outcomes)
    ranked = sorted(outcomes, key=lambda outcome: -speedup(outcome, plain))
    head = ["", *(f"{_clients(each)}: {name}" for each in plain.figures for name in _FIGURES)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for outcome in ranked:
        if outcome.error is not None:
            cells = ["failed", *[""] * (len(head) - 2)]
        else:
            cells = [
                cell
                for ours, theirs in zip(outcome.figures, plain.figures, strict=True)
                for cell in _cells(ours, theirs)
            ]
        rows.append([outcome.candidate.name, *cells])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{names}\n\n{table}\n\n{_answer(ranked, plain, given)}"


def plain_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Plain vLLM's."""
    return next(outcome for outcome in outcomes if outcome.candidate == PLAIN)


def _answer(ranked: Sequence[Outcome], plain: Outcome, given: Mapping[str, Any]) -> str:
    drafted = [each for each in ranked if each.candidate != PLAIN and each.error is None]
    if not drafted:
        return "Leave ssd off: no candidate could be measured; their logs say why."
    best = drafted[0]
    gain = speedup(best, plain)
    why = "\n".join(
        f"* {_clients(ours)}: {ours.tokens_per_s:.1f} tokens/s, {theirs.tokens_per_s:.1f} without: "
        f"a round yields {ours.tokens_per_round:.2f} tokens in {ours.ms_per_round:.1f} ms, and "
        f"plain vLLM's step one in {theirs.ms_per_round:.1f} ms; "
        f"{ours.hit or 0:.0%} of the rounds had their drafts ready at once"
        for ours, theirs in zip(best.figures, plain.figures, strict=True)
    )
    if gain < WORTH_IT:
        name = best.candidate.name
        return f"Leave ssd off: {name}, the best, is {gain:.2f} times plain vLLM.\n{why}"
    options = json.dumps(best.candidate.speculative_config(given))
    return (
        f"Use {best.candidate.name}: {gain:.2f} times plain vLLM.\n{why}\n\n"
        f"--speculative-config '{options}'"
    )


def _cells(ours: Figures, theirs: Figures) -> list[str]:
    return [
        f"{ours.tokens_per_s:.1f}",
        f"{ours.tokens_per_s / theirs.tokens_per_s:.2f}",
        f"{ours.tokens_per_round:.2f}",
        f"{ours.ms_per_round:.1f}",
        "" if ours.hit is None else f"{ours.hit:.0%}",
    ]


def _clients(figures: Figures) -> str:
    return f"{figures.clients} client{'s' if figures.clients > 1 else ''}"
