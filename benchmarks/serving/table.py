"""All runs side by side, as markdown."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.common.markdown import table_head, table_row
from benchmarks.serving.records import KINDS, OURS, Load, Result, Run, Side, Spread

_NONE = "–"
_GIVEN = "tokens a round are given, not measured. The head has no weights: its drafts are nonsense."
# Those that others are compared with; ssd-f0 is ordinary speculation.
_BASELINES = [kind for kind in KINDS if kind not in OURS or kind == "ssd-f0"]
_OF_LOAD: dict[str, Callable[[Run], str]] = {
    "client": lambda run: run.client,
    "data": lambda run: run.load.dataset,
    "prompt": lambda run: str(run.load.prompt_tokens or "own"),
    "turns": lambda run: str(run.load.turns),
    "T": lambda run: f"{run.load.temperature:g}",
    "clients": lambda run: str(run.load.concurrency or "any"),
    "repeat": lambda run: str(run.load.repeat),
}


def markdown(results: Sequence[Result], per_gpu: bool = False) -> str:
    """What is the same in all runs, a table of them, and what failed. per_gpu: whether ratios are
    those of tokens a second per GPU."""
    runs = [(result.side, run) for result in results for run in result.runs]
    varied = [name for name, of in _OF_LOAD.items() if len({of(run) for _, run in runs}) > 1]
    bases = [_base(side) for kind in _BASELINES for side, _ in runs if side.kind == kind]
    told = varied, list(dict.fromkeys(bases)), per_gpu
    rows = [dict(_row(side, run, runs, *told)) for side, run in _by_load(runs)]
    lines = []
    if rows:
        same = [name for name in _OF_LOAD if name not in varied and name != "repeat"]
        fixed = [f"{name} {_OF_LOAD[name](runs[0][1])}" for name in same]
        lines = [f"{', '.join(fixed)}. Times in ms: mean / median / 99th percentile.", ""]
        shown = [name for name in rows[0] if any(row[name] != _NONE for row in rows)]
        lines.append(table_head(shown))
        lines += [table_row([cells[name] for name in shown]) for cells in rows]
        if given := dict.fromkeys(side.name for side, _ in runs if _is_given(side)):
            lines += ["", f"{', '.join(given)}: {_GIVEN}"]
    for result in results:
        if result.error is not None:
            lines += ["", f"{result.side.name} failed:", "", "```", result.error, "```"]
    return "\n".join(lines)


def speed(run: Run) -> float:
    """Output tokens a second."""
    return run.seen.tokens / run.seen.seconds


def _base(side: Side) -> str:
    """What others are compared with: the fastest side of a kind, or each that was given its
    tokens."""
    return side.name if _is_given(side) else side.kind


def _beside(
    side: Side, run: Run, runs: Sequence[tuple[Side, Run]], base: str
) -> tuple[Side, Run] | None:
    """The fastest run of a side that is ``base`` under the same load; None if there is none."""
    same = [
        (other_side, other)
        for other_side, other in runs
        if _base(other_side) == base and (other.client, other.load) == (run.client, run.load)
    ]
    return max(same, key=lambda pair: speed(pair[1]), default=None)


def _row(
    side: Side,
    run: Run,
    runs: Sequence[tuple[Side, Run]],
    varied: Sequence[str],
    bases: Sequence[str],
    per_gpu: bool,
) -> Iterator[tuple[str, str]]:
    """(column, cell) of a run."""
    seen, counted = run.seen, run.speculation
    for name in varied:
        yield name, _OF_LOAD[name](run)
    yield "side", side.name
    yield "tokens/s", f"{speed(run):.1f}"
    for base in bases:
        other = None if _base(side) == base else _beside(side, run, runs, base)
        ratio = speed(run) / speed(other[1]) if other else 0.0
        if other and per_gpu:
            ratio *= other[0].gpus / side.gpus
        yield f"x {base}", f"{ratio:.2f}" if other else _NONE
    yield "GPUs", str(side.gpus or _NONE)
    yield "tokens/s/GPU", f"{speed(run) / side.gpus:.1f}" if side.gpus else _NONE
    yield "E2E", _spread(seen.e2e, 0)
    yield "TTFT", _spread(seen.ttft, 0)
    yield "ITL", _spread(seen.itl, 1)
    yield "TPOT", _spread(seen.tpot, 1)
    yield "longest gap", _spread(seen.gap, 0)
    yield "tokens a round", f"{counted.tokens_per_round:.2f}" if counted else _NONE
    yield "hit / miss / late", _shares(counted)
    comparable = side.kind != "plain" and not _is_given(side)
    plain = _beside(side, run, runs, "plain") if comparable else None
    yield "texts as plain", _same_texts(run, plain[1] if plain else None)


def _same_texts(run: Run, plain: Run | None) -> str:
    """How many greedy answers, or chats, are plain vLLM's. In 16 bits some part at near ties."""
    if plain is None or run.load.temperature:
        return _NONE
    same = sum(own == other for own, other in zip(run.seen.texts, plain.seen.texts))
    return f"{same} of {len(run.seen.texts)}"


def _is_given(side: Side) -> bool:
    """Whether its tokens a round were set beforehand."""
    return "synthetic_acceptance_length" in side.engine.get("speculative_config", {})


def _by_load(runs: Sequence[tuple[Side, Run]]) -> list[tuple[Side, Run]]:
    """Runs of one load together, loads and sides in the order in which they were measured."""
    order: dict[tuple[str, Load], int] = {}
    for _, run in runs:
        order.setdefault((run.client, run.load), len(order))
    return sorted(runs, key=lambda pair: order[pair[1].client, pair[1].load])


def _spread(times: Spread, digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in (times.mean, times.p50, times.p99))


def _shares(counted: Any) -> str:
    if counted is None or counted.hit is None:
        return _NONE
    return f"{counted.hit:.0%} / {counted.miss:.0%} / {counted.late:.0%}"
