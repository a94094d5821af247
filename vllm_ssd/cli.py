"""``vllm-ssd``: looks at running engines, whether one can be started, and with which options."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from vllm_ssd import __version__
from vllm_ssd.check import command as check
from vllm_ssd.metrics import describe, snapshot
from vllm_ssd.service import rundir
from vllm_ssd.table import SpeculationTable
from vllm_ssd.tune import command as tune

WORK = {
    "prefill": "prefill (tokens)",
    "glue": "glue",
    "branch": "branch step",
    "fallback": "fallback step",
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="vllm-ssd", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("stats", help="counters of this user's running engines")
    check.add_command(commands)
    tune.add_command(commands)
    args, further = parser.parse_known_args(arguments)
    if further and not hasattr(args, "takes_further"):
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    return args.run(args, further) if hasattr(args, "run") else show_stats()


def show_stats() -> int:
    """Print every engine's counters since its start; returns 1 if no engine with SSD runs."""
    found = 0
    for run_dir in rundir.living():
        path = rundir.table_path(run_dir)
        try:
            table = SpeculationTable.open(path, writable=False)
        except FileNotFoundError:
            continue  # starting or stopping right now
        except ValueError as error:  # another version of this package, in another environment
            print(error)
            continue
        found += 1
        print("\n".join(report(path, table)))
    if not found:
        print("no engine with method ssd is running under this user")
    return 0 if found else 1


def report(path: Path, table: SpeculationTable) -> list[str]:
    """The lines that are printed for one engine."""
    counters = snapshot(table)
    age = (time.monotonic_ns() - counters["heartbeat"]) / 1e9
    beat = f"last seen {age:.1f} s ago"
    if not counters["heartbeat"]:
        beat = "is gone or sleeps" if counters["pid"] else "has not started yet"
    lines = [
        f"engine {path.stem}: k={table.shape.k}, {table.shape.branches} branches, "
        f"{table.shape.slots} slots",
        f"  target  {describe(counters)}",
        f"  draft   process {counters['pid']}, {beat}, {counters['live']} requests, "
        f"{counters['free_blocks']} free KV blocks, started again {counters['restarts']} times",
    ]
    for name, label in WORK.items():
        count = counters[name]
        mean = counters[f"{name}_us"] / max(count, 1) / 1000
        lines.append(f"  draft   {label}: {count}, {mean:.2f} ms each")
    return lines


if __name__ == "__main__":
    sys.exit(main())
