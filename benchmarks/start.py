"""How long a server takes until it answers, plain and with ssd, the same target and settings.

    python -m benchmarks.start --target 8192,45,64,8,128,28672 --k 7 --f 3

One server at a time, as `vllm serve` starts it with vLLM's defaults. A cold start finds empty
caches of compiled code (vLLM's, torch's, Triton's), a warm one those of the cold start before it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import add_engine_arguments, log_folder
from benchmarks.common.gpus import visible_gpus
from benchmarks.common.markdown import table_head, table_row
from benchmarks.common.server import healthy_server
from benchmarks.common.subject import find_subject
from benchmarks.serving.records import Side
from benchmarks.serving.sides import Plan

_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; raises what a server fails with."""
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
        options=[dict(args.option)],
    )
    logs = log_folder(args)
    plain: dict[str, float] = {}  # seconds of a cold and of a warm start
    print(table_head(("start", "side", "s until it answers", "x plain")), flush=True)
    for side in plan.sides():
        for state, took in _starts(side, args, logs):
            if side.kind == "plain":
                plain[state] = took
            ratio = f"{took / plain[state]:.2f}" if state in plain else "–"
            print(table_row([state, side.name, f"{took:.1f}", ratio]), flush=True)
        if gpus:
            visible_gpus([used for _, used in gpus])
    return 0


def _starts(side: Side, args: argparse.Namespace, logs: Path) -> Iterator[tuple[str, float]]:
    """(cold or warm, seconds until the server is healthy) of one or both."""
    with tempfile.TemporaryDirectory(prefix="ssd-caches-") as caches:
        folders = {name: str(Path(caches, name.lower())) for name in _CACHES}
        for state in ("cold", "warm") if args.warm else ("cold",):
            log = logs / f"{side.kind}-{state}.log"
            begun = time.monotonic()
            environment = {**side.environment, **folders}
            with healthy_server(side.engine, log, args.start_timeout, environment):
                took = time.monotonic() - begun
            yield state, took


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
    add("--warm", action="store_true", help="start each a second time with the caches of the first")
    add("--start-timeout", type=float, default=900.0, help="seconds that a start may take")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
