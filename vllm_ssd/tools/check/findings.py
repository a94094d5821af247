"""Findings of a check. Each is shown as one line, with its remedy on the next line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One result of a check. name: the thing that was checked. fact: what was found. state: "bad"
    if ssd cannot start, "note" if it starts but is slower or less safe. remedy: what to do then."""

    state: Literal["ok", "note", "bad"]
    name: str
    fact: str
    remedy: str = ""

    def shown(self) -> str:
        """The finding's line, and the remedy on a second line if there is one."""
        line = f"{self.state:<5} {self.name:<16} {self.fact}"
        return f"{line}\n{'':<5} {'':<16} -> {self.remedy}" if self.remedy else line


def refusal(name: str, error: Exception) -> Finding:
    """A bad finding from an error of ssd, whose sentence ends with ": " and the remedy."""
    fact, colon, remedy = str(error).removeprefix("SSD: ").rpartition(": ")
    return Finding("bad", name, fact, remedy) if colon else Finding("bad", name, remedy)


def summary(findings: Sequence[Finding]) -> str:
    """The last line of the output: whether ssd can start, and the number of bad lines and notes."""
    bad = sum(finding.state == "bad" for finding in findings)
    notes = sum(finding.state == "note" for finding in findings)
    end = f"ssd could not start: {bad} of {len(findings)} lines are bad" if bad else "ssd can start"
    return f"{end}, {notes} to note" if notes else end


@contextmanager
def quiet_vllm() -> Iterator[None]:
    """Hide vLLM's log lines about configs; its errors go to stderr. The environment is as before
    afterwards: making a config changes it, too."""
    before = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def say(text: str) -> None:
    """Print a text for the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def say_wait(text: str) -> None:
    """Announce a step that may take long, on stderr."""
    say(f"{'...':<5} {text}")


def gib(count: float) -> str:
    """A number of bytes as text in GiB."""
    return f"{count / GIB:.2f} GiB" if count < 10 * GIB else f"{count / GIB:.0f} GiB"
