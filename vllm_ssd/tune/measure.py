"""Measures one candidate: a process of its own, what it tells, and the end of its engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from vllm_ssd.measure.process import Measuring
from vllm_ssd.service import rundir
from vllm_ssd.tune.engine import Event, Measured, Order, Up
from vllm_ssd.tune.records import Candidate, Figures, Outcome, Setting

# For the draft to be put away: the next engine wants its memory.
_GONE_S = 60.0


def measure(
    candidate: Candidate,
    setting: Setting,
    environment: Mapping[str, str],
    logs: Path,
    limit_s: float,
    say: Callable[[str], None],
) -> Outcome:
    """Start the engine, measure it, and see it end. What goes wrong is the outcome's error.

    environment: of its process, added to this one's. logs: the folder of its log. limit_s: seconds
    after which it has failed. say: progress, a line each.
    """
    decoder = msgspec.json.Decoder(Event)
    order = Order(setting.target, setting.engine, candidate, setting.load, setting.prompts)
    log = logs / (re.sub(r"[^\w.=-]+", "-", candidate.name) + ".log")
    figures: list[Figures] = []
    run_dir: str | None = None
    began = time.monotonic()
    say(f"{candidate.name}: its engine starts; its log is {log}")
    told = msgspec.json.encode(order)
    with Measuring("vllm_ssd.tune.engine", told, environment, log, limit_s) as process:
        for line in process.lines():
            match decoder.decode(line):
                case Up(run_dir):
                    say(f"{candidate.name}: it is up after {time.monotonic() - began:.0f} s")
                case Measured(new):
                    figures.append(new)
                    clients = f"{new.clients} client{'s' if new.clients > 1 else ''}"
                    say(f"{candidate.name}: {clients}: {new.tokens_per_s:.1f} tokens/s")
        error = process.error()
    if run_dir is not None:
        _wait_until_gone(Path(run_dir))
    if error is None and len(figures) < len(setting.load.clients):
        error = "it ended before it was measured"
    if error is not None:
        say(f"{candidate.name}: failed, {error.splitlines()[0]}; see {log}")
        return Outcome(candidate, error=error)
    return Outcome(candidate, figures)


def _wait_until_gone(run_dir: Path) -> None:
    deadline = time.monotonic() + _GONE_S
    while rundir.is_alive(run_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
