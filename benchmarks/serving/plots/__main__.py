"""Draws what `python -m benchmarks.serving --json FILE` has saved, as SVG:

    python -m benchmarks.serving.plots FILE --out FOLDER

Speed-up over what was varied, throughput against latency, distributions of times, and, of a run
with --timeline, target and draft side by side. Of several clients it is the first that counts.
--draft-round draws what `benchmarks.draft_round
--json` has saved.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.serving.plots.curves import Axis, pareto, speed_up
from benchmarks.serving.plots.distributions import Times, distribution, told_by
from benchmarks.serving.plots.method import draft_step, timeline
from benchmarks.serving.records import Saved

_AXES: dict[str, tuple[str, Axis]] = {
    "concurrency": ("requests at a time", lambda load: load.concurrency),
    "rate": ("requests/s", lambda load: load.rate),
    "length": ("prompt tokens", lambda load: load.prompt_tokens),
}
_TIMES: dict[str, Times] = {"ttft": "ttfts_ms", "itl": "itls_ms"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; prints the files made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.plots", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="results of benchmarks.serving")
    parser.add_argument("--draft-round", type=Path, help="results of benchmarks.draft_round")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the plots")
    args = parser.parse_args(arguments)
    if args.file is None and args.draft_round is None:
        parser.error("nothing to draw: name a file of results")
    args.out.mkdir(parents=True, exist_ok=True)
    made = []
    if args.file is not None:
        saved = msgspec.json.decode(args.file.read_bytes(), type=Saved)
        made += draw(saved, args.out)
    if args.draft_round is not None:
        made.append(args.out / "draft-step.svg")
        draft_step(json.loads(args.draft_round.read_text(encoding="utf-8")), made[-1])
    print("\n".join(map(str, made)))
    return 0


def draw(saved: Saved, out: Path) -> list[Path]:
    """All plots that these results have enough for; their paths."""
    saved = _of_first_client(saved)
    runs = [run for result in saved.results for run in result.runs]
    made = []
    for name, (words, axis) in _AXES.items():
        if len({axis(run.load) for run in runs} - {None}) > 1:
            made.append(out / f"speed-up-{name}.svg")
            speed_up(saved, axis, words, made[-1])
    if runs:
        made.append(out / "pareto.svg")
        pareto(saved, made[-1])
    for number, load in enumerate(told_by(runs)):
        for name, times in _TIMES.items():
            made.append(out / f"{name}-{number}.svg")
            distribution(saved, times, load, made[-1])
    for result in saved.results:
        if result.timeline:
            # Names of sides have blanks and signs.
            made.append(out / f"timeline-{re.sub('[^a-z0-9]+', '-', result.side.name)}.svg")
            timeline(result.timeline, result.side.name, made[-1])
    return made


def _of_first_client(saved: Saved) -> Saved:
    clients = [run.client for result in saved.results for run in result.runs]
    results = [
        replace(result, runs=[run for run in result.runs if run.client == clients[0]])
        for result in saved.results
    ]
    return replace(saved, results=results)


if __name__ == "__main__":
    sys.exit(main())
