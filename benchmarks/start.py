"""How long a server takes until it answers, plain and with ssd, the same target and settings.

    python -m benchmarks.start --target 8192,45,64,8,128,28672 --k 7 --f 3

One server at a time, as `vllm serve` starts it with vLLM's defaults. A cold start finds empty
caches of compiled code (vLLM's, torch's, Triton's), a warm one those of the cold start before it.
The stages are seconds since the command, as the server's log has them (whole seconds there).
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.arguments import add_engine_arguments, combinations
from benchmarks.common.gpus import visible_gpus
from benchmarks.common.markdown import table_head, table_row
from benchmarks.common.server import ServerFailed, healthy_server
from benchmarks.common.subject import find_subject
from benchmarks.serving.records import Side
from benchmarks.serving.sides import Plan
from benchmarks.standin.folders import say

# What is said first when a stage is over, in the order of a start.
STAGES = {
    "engine core begins": "Initializing a V1 LLM engine",
    "weights loaded": "Loading weights took",
    "compiled": "torch.compile took",
    "KV cache allocated": "GPU KV cache size",
    "kernels compiled": "JIT kernel warmup finished",
    "graphs and step costs": "Graph capturing finished",
    "draft loaded": "KV cache) loaded in",
}
_STAMP = re.compile(r"(?:INFO|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d)")
_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a server did not start."""
    args = _parse(arguments)
    subject = find_subject("benchmarks.start", arguments, args)
    gpus = subject.gpus
    plan = Plan(
        engine=subject.engine,
        kinds=args.sides,
        drafts=[subject.draft],
        k=[args.k],
        f=[args.f],
        other_k=[args.k],
        gpus=len(gpus),
        tps=[args.tp],
        options=combinations(args.option),
    )
    logs = args.logs or Path(tempfile.mkdtemp(prefix="ssd-start-"))
    logs.mkdir(parents=True, exist_ok=True)
    seconds: dict[tuple[str, str], list[float]] = {}
    try:
        for repeat in range(args.repeats):
            for side in plan.sides():
                for state, took in _starts(side, args.warm, logs / f"{side.kind}-{repeat}", args):
                    seconds.setdefault((state, side.name), []).append(took)
                if gpus:
                    visible_gpus([used for _, used in gpus])
    except ServerFailed as error:
        say(f"python -m benchmarks.start: {error}")
        return 1
    print(_table(seconds))
    return 0


def _starts(
    side: Side, warm: bool, log: Path, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """(cold or warm, seconds until the server is healthy) of one or both."""
    with tempfile.TemporaryDirectory(prefix="ssd-caches-") as caches:
        folders = {name: str(Path(caches, name.lower())) for name in _CACHES}
        for state in ("cold", "warm") if warm else ("cold",):
            path = log.with_name(f"{log.name}-{state}.log")
            begun, now = time.monotonic(), datetime.now()
            environment = {**side.environment, **folders}
            with healthy_server(side.engine, path, args.start_timeout, environment):
                took = time.monotonic() - begun
            said = ", ".join(f"{what} {s:.0f}" for what, s in stages(path.read_text(), now))
            say(f"{side.name}, {state}: {took:.1f} s ({said})")
            yield state, took


def stages(log: str, begun: datetime) -> list[tuple[str, float]]:
    """(stage, seconds from ``begun`` until the log says for the first time that it is over)."""
    found = {}
    for line in log.splitlines():
        for what, words in STAGES.items():
            stamp = _STAMP.search(line)
            if words in line and stamp and what not in found:
                when = datetime.strptime(f"{begun.year}-{stamp[1]}", "%Y-%m-%d %H:%M:%S")
                found[what] = (when - begun).total_seconds()
    return [(what, found[what]) for what in STAGES if what in found]


def _table(seconds: dict[tuple[str, str], list[float]]) -> str:
    lines = [table_head(("start", "side", "s until it answers, median", "every one", "x plain"))]
    for (state, name), took in seconds.items():
        plain = seconds.get((state, "plain"))
        ratio = f"{median(took) / median(plain):.2f}" if plain else "–"
        every = ", ".join(f"{each:.1f}" for each in took)
        lines.append(table_row([state, name, f"{median(took):.1f}", every, ratio]))
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    sides: dict[str, Any] = {"nargs": "+", "choices": ("plain", "draft_model", "ssd")}
    add("--sides", default=["plain", "ssd"], help="default: plain ssd", **sides)
    add_engine_arguments(parser)
    add("--k", type=int, default=7)
    add("--f", type=int, default=3)
    add("--repeats", type=int, default=1, help="starts of each side")
    add("--warm", action="store_true", help="start each a second time with the caches of the first")
    add("--start-timeout", type=float, default=900.0, help="seconds that a start may take")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
