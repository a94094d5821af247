"""Speed-up over load, and throughput against latency."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.serving.plots.style import INK, look, plot
from benchmarks.serving.records import Load, Run, Saved
from benchmarks.serving.table import beside, speed

Axis = Callable[[Load], float | None]


def speed_up(saved: Saved, axis: Axis, name: str, path: Path) -> None:
    """Tokens a second of every side over those of plain vLLM under the same load. axis: of a load;
    None: it is not drawn. name: of the axis, with its unit."""
    runs = [(result.side, run) for result in saved.results for run in result.runs]
    sides = [result.side for result in saved.results]
    with plot(path, "Speed-up", name, "output tokens/s, times plain vLLM") as axes:
        axes.axhline(1.0, color=INK, linewidth=1)
        for result in saved.results:
            points = []
            for run in result.runs:
                plain, at = beside(result.side, run, runs, "plain"), axis(run.load)
                if plain is not None and at is not None and result.side.kind != "plain":
                    points.append((at, speed(run) / speed(plain)))
            if points:
                axes.plot(*zip(*sorted(points)), marker="o", **look(result.side, sides))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=0)


def pareto(saved: Saved, path: Path) -> None:
    """What all users get together against what one gets, from few to many at a time."""
    sides = [result.side for result in saved.results]
    gpus = any(side.gpus for side in sides)
    y = "output tokens/s a GPU" if gpus else "output tokens/s"
    title = "Throughput and speed for one user, by load"
    with plot(path, title, "tokens/s for one user (1 / mean TPOT)", y) as axes:
        for result in saved.results:
            points = [_point(run, result.side.gpus or 1) for run in result.runs if _user(run)]
            if points:
                axes.plot(*zip(*points), marker="o", **look(result.side, sides))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)


def _point(run: Run, gpus: int) -> tuple[float, float]:
    return _user(run), speed(run) / gpus


def _user(run: Run) -> float:
    """Tokens a second of an answer after its first token; 0 where answers have one."""
    return 1000 / run.seen.tpot.mean if run.seen.tpot.mean else 0.0
