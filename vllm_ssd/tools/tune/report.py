"""The report of a tuning: a table of all candidates, and the candidate to use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_ssd.tools.tune.candidates import PLAIN, Candidate, Outcome, speedup

_WORTH_IT = 1.03  # least ratio to plain vLLM: below it, a draft's device has better uses
_HEAD = ("", "clients", "tokens/s", "x plain", "tokens/round", "ms/token", "hits")


def report(outcomes: Mapping[Candidate, Outcome], given: Mapping[str, Any]) -> str:
    """A markdown table with the best candidate first, then a sentence with the advice. given:
    further options of --speculative-config."""
    plain = outcomes[PLAIN]
    ranked = sorted(outcomes, key=lambda each: -speedup(outcomes[each], plain))
    rows = [_HEAD]
    for candidate in ranked:
        for clients, figures in outcomes[candidate].items():
            times = figures.output_throughput / plain[clients].output_throughput
            hits = "" if figures.ssd_hit_rate is None else f"{figures.ssd_hit_rate:.0%}"
            rows.append(
                (
                    candidate.name,
                    str(clients),
                    f"{figures.output_throughput:.1f}",
                    f"{times:.2f}",
                    f"{figures.spec_decode_acceptance_length:.2f}",
                    f"{figures.mean_tpot_ms:.1f}",
                    hits,
                )
            )
    first, *others = (max(map(len, column)) for column in zip(*rows))
    lines = [
        f"| {name:<{first}} | {' | '.join(map(str.rjust, cells, others))} |"
        for name, *cells in rows
    ]
    lines.insert(1, f"|-{'-' * first}-|{'|'.join('-' * (width + 1) + ':' for width in others)}|")
    return "\n".join([*lines, "", _answer(ranked, outcomes, given)])


def _answer(
    ranked: list[Candidate], outcomes: Mapping[Candidate, Outcome], given: Mapping[str, Any]
) -> str:
    best = next((each for each in ranked if each != PLAIN), PLAIN)
    gain = speedup(outcomes[best], outcomes[PLAIN])
    if not outcomes[best]:
        return "Leave ssd off: no candidate could be measured; the steps above say why."
    if gain < _WORTH_IT:
        return f"Leave ssd off: {best.name}, the best, is {gain:.2f} times plain vLLM."
    options = json.dumps(best.speculative_config(given))
    return f"Use this, {gain:.2f} times plain vLLM: --speculative-config '{options}'"
