"""What the turns show, in words: the table, whether the texts are the same, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from examples.demo.plan import Plan
from examples.demo.side import Turn
from vllm_ssd.metrics import rates

GAIN = 1.6  # from here on a gain needs no explanation
# Up to here the turns of one engine differ by chance, and what others take changes little.
MOST_SPREAD, MOST_TAKEN = 0.2, 0.05


def ratio(plain: Sequence[Turn], ssd: Sequence[Turn]) -> float:
    """Tokens a second of the middle turn with SSD, times those of plain vLLM's."""
    return median(_speeds(ssd)) / median(_speeds(plain))


def table(plain: Sequence[Turn], ssd: Sequence[Turn]) -> Table:
    """Both sides, a column each."""
    shown = Table("", "plain", "SSD", title="what SSD gained")
    shown.columns[1].justify = shown.columns[2].justify = "right"
    derived = rates(_sum([turn.counters or {} for turn in ssd]))
    shown.add_row("tokens/s, middle turn", *(f"{median(_speeds(t)):.1f}" for t in (plain, ssd)))
    shown.add_row(
        "slowest and fastest turn",
        *(f"{min(_speeds(t)):.1f} to {max(_speeds(t)):.1f}" for t in (plain, ssd)),
    )
    shown.add_row("ratio", "1", f"{ratio(plain, ssd):.2f}", style="bold")
    shown.add_row("tokens a round", "1", f"{derived['tokens_per_round']:.2f}")
    for result in ("hit", "miss", "late"):
        shown.add_row(f"share of rounds: {result}", "", f"{derived[result]:.0%}")
    others = (f"{median([turn.taken for turn in turns]):.0%}" for turns in (plain, ssd))
    shown.add_row("cores' time for other programs", *others)
    return shown


def verdict(plain: Sequence[Turn], ssd: Sequence[Turn], plan: Plan) -> str:
    """What to make of the table, in a sentence or two."""
    gain = ratio(plain, ssd)
    unsettled = too_noisy(plain, ssd)
    if unsettled is not None:
        return (
            f"This machine is too noisy to tell: {unsettled}. The ratio, {gain:.2f}, may be far "
            "from what SSD gains; close other programs and run this again."
        )
    if gain >= GAIN:
        return f"With SSD the same text comes {gain:.2f} times as fast, from the same cores."
    derived = rates(_sum([turn.counters or {} for turn in ssd]))
    tokens = derived["tokens_per_round"]
    return (
        f"A core each: verifying {plan.k + 1} tokens on the target's takes as long as "
        f"{plan.round_cost:.2f} steps of plain vLLM on all cores, so {tokens:.1f} tokens a round "
        f"can gain {tokens / plan.round_cost:.2f} times on this CPU; {gain:.2f} is what "
        f"{derived['wait_ms']:.0f} ms a round of waiting for the draft leave of it. With a device "
        "of the draft's own it costs the target nothing: benchmarks/results/h200-served.md."
    )


def too_noisy(plain: Sequence[Turn], ssd: Sequence[Turn]) -> str | None:
    """Why the ratio means little, or None."""
    for name, turns in (("plain vLLM", plain), ("vLLM with SSD", ssd)):
        share = median([turn.taken for turn in turns])
        if share > MOST_TAKEN:
            return f"other programs took {share:.0%} of the cores while {name} answered"
        speeds = _speeds(turns)
        spread = (max(speeds) - min(speeds)) / median(speeds)
        if spread > MOST_SPREAD:
            return f"{name} took turns from {min(speeds):.1f} to {max(speeds):.1f} tokens/s"
    return None


def same_text(turns: Sequence[Turn]) -> str | None:
    """None if all turns have the same answers; else, in words, where one parts from the first."""
    for turn in turns[1:]:
        parting = first_difference(turns[0].answers, turn.answers)
        if parting is not None:
            return parting
    return None


def first_difference(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> str | None:
    """Where answers part, in words; None if they do not."""
    for number, (one, other) in enumerate(zip(left, right, strict=True), start=1):
        if one == other:
            continue
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        return (
            f"answer {number} parts after {same} tokens: {list(one[same : same + 4])} is not "
            f"{list(other[same : same + 4])}"
        )
    return None


def _speeds(turns: Sequence[Turn]) -> list[float]:
    return [turn.tokens_per_second for turn in turns]


def _sum(counters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the counters that ``rates`` needs."""
    total: dict[str, Any] = {
        name: sum(each[name] for each in counters)
        for name in ("rounds", "hits", "misses", "late", "wait_us")
    }
    total["accepted"] = [sum(many) for many in zip(*(each["accepted"] for each in counters))]
    return total
