"""What a check finds, and how it is shown: a line each, with the remedy below it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "bad"]
_NAME_WIDTH = 16  # characters
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """name: what was looked at. fact: what is there. state: "bad" if ssd could not start with it,
    "note" if it can, but not as fast or as safely as it could. remedy: what to do then."""

    state: State
    name: str
    fact: str
    remedy: str = ""

    def shown(self) -> str:
        """Its line, and below it the remedy if there is one."""
        line = f"{self.state:<5} {self.name:<{_NAME_WIDTH}} {self.fact}"
        return f"{line}\n{'':<5} {'':<{_NAME_WIDTH}} -> {self.remedy}" if self.remedy else line


def refusal(name: str, error: Exception) -> Finding:
    """From a sentence of ssd's own, which ends with ": " and the remedy."""
    fact, colon, remedy = str(error).removeprefix("SSD: ").rpartition(": ")
    return Finding("bad", name, fact, remedy) if colon else Finding("bad", name, remedy)


def could_start(findings: Sequence[Finding]) -> bool:
    """Whether ssd could start as far as these findings go."""
    return all(finding.state != "bad" for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """The last line of the screen."""
    bad = sum(finding.state == "bad" for finding in findings)
    notes = sum(finding.state == "note" for finding in findings)
    end = f"ssd could not start: {bad} of {len(findings)} lines are bad" if bad else "ssd can start"
    return f"{end}, {notes} to note" if notes else end


def say(text: str) -> None:
    """Tell the user what happens, on stderr."""
    print(text, file=sys.stderr, flush=True)


def say_wait(text: str) -> None:
    """Tell the user of a step that may take long, before it begins."""
    say(f"{'...':<5} {text}")


def gib(count: float) -> str:
    """Bytes in words."""
    return f"{count / GIB:.2f} GiB" if count < 10 * GIB else f"{count / GIB:.0f} GiB"
