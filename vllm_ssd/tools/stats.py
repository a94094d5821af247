"""``vllm-ssd stats``: shows the counters of this user's running engines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from vllm_ssd.metrics.report import EngineReport
from vllm_ssd.table import SpeculationTable, rundir

_CONSOLE = Console(markup=False, emoji=False)  # a model's name may have brackets
NOBODY = "no engine with method ssd is running under this user"


def add_command(commands: Any) -> None:
    """Add the command ``stats`` to the subparsers of ``vllm-ssd``."""
    about = "Show what this user's running engines have counted since their start."
    parser = commands.add_parser(
        "stats",
        help=about,
        description=f"{about} There is a column for each engine and each shared draft. The exit "
        "status is 0 if there are engines and all their drafts serve.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="Print JSON with all counters.")
    how.add_argument(
        "--live",
        type=_seconds,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="Every SECONDS, show what is new since the last time, until Ctrl-C. Default: 1.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the table and return the process's exit status."""
    if args.live is not None:
        return _show_live(args.live)
    reading = Reading.now()
    if args.json:
        print(json.dumps([report.as_json() for report in reading.reports], indent=2))
        print(*reading.problems, sep="\n", end="", file=sys.stderr)
    else:
        _CONSOLE.print(reading.shown())
    return reading.status


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds: write one above 0 and below 1e9"
        )
    return seconds


@dataclass(frozen=True)
class Reading:
    """Counters of all engines at one time. problems: a sentence for each unreadable table."""

    reports: list[EngineReport]
    problems: list[str]

    @classmethod
    def now(cls) -> Reading:
        reading = cls([], [])
        for path in rundir.tables():
            try:
                table = SpeculationTable.open(path, writable=False)
                if not table.owner.model and not table.owner.named_by_user:
                    continue  # an engine's own draft: the engine's table has its counters, too
                reading.reports.append(EngineReport.read(table))
            except (FileNotFoundError, PermissionError):
                continue  # the engine is stopping, or another user has taken the name
            except ValueError as error:  # a table of another version of this package
                reading.problems.append(str(error))
        return reading

    def since(self, earlier: Reading) -> Reading:
        """Counts since an earlier reading; for new engines, counts since their start."""
        before = {report.path: report for report in earlier.reports}
        reports = [
            report.since(before[report.path]) if report.path in before else report
            for report in self.reports
        ]
        return Reading(reports, self.problems)

    def shown(self) -> Group:
        if not self.reports:
            return Group(*(self.problems or [NOBODY]))
        table = Table()
        table.add_column(no_wrap=True)
        for report in self.reports:
            table.add_column(report.title, justify="right", overflow="fold")
        for cells in zip(*(report.rows() for report in self.reports)):
            table.add_row(cells[0][0], *(value for _, value in cells))
        return Group(table, *self.problems)

    @property
    def status(self) -> int:
        """Exit status of the process: 0 if there are engines and every draft serves, else 1."""
        serve = [report.serves for report in self.reports]
        return 0 if serve and all(serve) and not self.problems else 1


def _show_live(seconds: float) -> int:
    """Update the table every ``seconds`` until Ctrl-C; return the last exit status."""
    reading = Reading.now()
    with Live(reading.shown(), console=_CONSOLE, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(seconds)
                before, reading = reading, Reading.now()
                live.update(reading.since(before).shown(), refresh=True)
        except KeyboardInterrupt:
            return reading.status
