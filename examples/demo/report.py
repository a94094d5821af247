"""What the exchanges show: the table, and the sentence that judges it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from examples.demo.plan import Plan
from examples.demo.side import Turn

GAIN = 1.3  # from here on a gain needs no explanation
# Up to here plain vLLM's speeds differ by chance, and what others take changes little.
MOST_SPREAD, MOST_TAKEN = 0.2, 0.05


def speed(turns: Sequence[Turn]) -> float:
    """Tokens a second of decoding."""
    seconds = sum(turn.seconds for turn in turns)
    return sum(turn.tokens for turn in turns) / seconds if seconds else 0.0


def ratio(plain: Sequence[Turn], ssd: Sequence[Turn]) -> float:
    """Tokens a second with SSD, times those of plain vLLM."""
    return speed(ssd) / speed(plain)


def table(plain: Sequence[Turn], ssd: Sequence[Turn], plan: Plan) -> Table:
    """Both sides, a column each."""
    sides = (plain, ssd)
    shown = Table("", "plain vLLM", "SSD")
    shown.columns[1].justify = shown.columns[2].justify = "right"
    counted = _a_round(ssd)
    emphasis = "bold" if too_noisy(plain, ssd) is None else None
    shown.add_row("answers", *(str(len(turns)) for turns in sides))
    shown.add_row("tokens a second, decoding only", *(f"{speed(turns):.1f}" for turns in sides))
    shown.add_row("ratio", "1", f"{ratio(plain, ssd):.2f}", style=emphasis)
    shown.add_row("slowest and fastest answer", *(_range(turns) for turns in sides))
    shown.add_row("tokens a round", "1", f"{tokens_a_round(ssd):.2f}")
    shown.add_row("a round, in steps of plain vLLM", "1", f"{round_cost(plain, ssd):.2f}")
    shown.add_row("waited for the draft, ms a round", "", f"{counted['wait_us'] / 1000:.0f}")
    shares = " / ".join(f"{counted[name] * 100:.0f}" for name in ("hits", "misses", "late"))
    shown.add_row("hits / misses / late, %", "", shares)
    shown.add_row("draft tokens, branches a position", "", f"k={plan.k}, f={plan.f}")
    others = (max(turn.taken for turn in turns) for turns in sides)
    shown.add_row("cores' time for other programs", *(f"{share:.0%}" for share in others))
    return shown


def tokens_a_round(turns: Sequence[Turn]) -> float:
    """Tokens of decoding, by rounds."""
    return sum(turn.tokens for turn in turns) / max(sum(turn.rounds for turn in turns), 1)


def round_cost(plain: Sequence[Turn], ssd: Sequence[Turn]) -> float:
    """How long a round takes with SSD, waits included, in steps of plain vLLM."""
    return tokens_a_round(ssd) / tokens_a_round(plain) / ratio(plain, ssd)


def verdict(plain: Sequence[Turn], ssd: Sequence[Turn]) -> str:
    """What to make of the table, in a sentence."""
    gain = ratio(plain, ssd)
    if (parting := same_text(plain, ssd)) is not None:
        return f"The texts differ, which is a fault of ssd: {parting}."
    if (reason := too_noisy(plain, ssd)) is not None:
        return (
            f"The texts are equal, but this machine is too noisy to tell the gain ({reason}): "
            "close other programs and run this again."
        )
    if gain >= GAIN:
        return f"With SSD the same text comes {gain:.2f} times as fast, from the same cores."
    return (
        f"With SSD the same text comes {gain:.2f} times as fast: a round brings "
        f"{tokens_a_round(ssd):.1f} tokens, and on the target's core of this CPU takes as long as "
        f"{round_cost(plain, ssd):.1f} steps of plain vLLM on all cores, where on GPUs it takes "
        "about one."
    )


def too_noisy(plain: Sequence[Turn], ssd: Sequence[Turn]) -> str | None:
    """Why the ratio means little, or None. Plain vLLM decodes every text at one speed."""
    for name, turns in (("plain vLLM", plain), ("SSD", ssd)):
        share = max(turn.taken for turn in turns)
        if share > MOST_TAKEN:
            return f"other programs took {share:.0%} of the cores while {name} answered"
    speeds = [speed([turn]) for turn in plain]
    if (max(speeds) - min(speeds)) / speed(plain) > MOST_SPREAD:
        return f"plain vLLM decoded at {_range(plain)} tokens a second"
    return None


def same_text(plain: Sequence[Turn], ssd: Sequence[Turn]) -> str | None:
    """None if both sides have the same answers; else, in words, where one parts."""
    pairs = zip(plain, ssd, strict=True)
    partings = (first_difference(one.token_ids, other.token_ids) for one, other in pairs)
    return next((parting for parting in partings if parting is not None), None)


def first_difference(one: Sequence[int], other: Sequence[int]) -> str | None:
    """Where two answers part, in words; None if they do not."""
    if one == other:
        return None
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return f"after {same} tokens {list(one[same : same + 4])} is not {list(other[same : same + 4])}"


def _range(turns: Sequence[Turn]) -> str:
    speeds = [speed([turn]) for turn in turns]
    return f"{min(speeds):.1f} to {max(speeds):.1f}"


def _a_round(turns: Sequence[Turn]) -> dict[str, float]:
    """Counters of a draft, divided by the rounds."""
    each = [turn.counters or {} for turn in turns]
    names = ("rounds", "hits", "misses", "late", "wait_us")
    total = {name: sum(counters.get(name, 0) for counters in each) for name in names}
    return {name: count / max(total["rounds"], 1) for name, count in total.items()}
