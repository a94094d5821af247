"""At the end of a run of tests that start engines: where the time went, by file. All starts are in
``engine-times.jsonl`` of pytest's cache (``benchmarks.common.times`` says what a line has)."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from typing import Any

import pytest

from benchmarks.common.times import FILE


def pytest_configure(config: pytest.Config) -> None:
    # A process of xdist's has the file of the first one.
    if not hasattr(config, "workerinput") and config.cache is not None:
        folder = config.cache.mkdir("vllm-ssd")
        path = folder / "engine-times.jsonl"
        path.unlink(missing_ok=True)
        os.environ[FILE] = str(path)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """tests: seconds of a file's tests with their fixtures. starting: seconds from the beginning of
    each engine or server until it is ready."""
    try:
        with open(os.environ[FILE]) as file:
            starts = [json.loads(line) for line in file]
    except (KeyError, FileNotFoundError):
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("time by file")
    terminalreporter.write_line(f"{'tests':>6} {'starts':>6} {'starting':>8}  file")
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True):
        of_file = [start for start in starts if start["test"] == name]
        starting = sum(max(start["ready"] - start["begin"], 0) for start in of_file)
        line = f"{seconds[name]:6.0f} {len(of_file):6d} {starting:8.0f}  {name}"
        terminalreporter.write_line(line)
