"""What a check has found, and how it is shown: a line each, with the remedy below it."""

from __future__ import annotations

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


def refusal(name: str, error: Exception) -> Finding:
    """From a sentence of ssd's own, which ends with ": " and the remedy."""
    fact, colon, remedy = str(error).removeprefix("SSD: ").rpartition(": ")
    return Finding("bad", name, fact, remedy) if colon else Finding("bad", name, remedy)


def could_start(findings: Sequence[Finding]) -> bool:
    """Whether ssd could start as far as these findings go."""
    return all(finding.state != "bad" for finding in findings)


def screen(findings: Sequence[Finding]) -> str:
    """The lines of all findings, and one that sums them up."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<5} {finding.name:<{_NAME_WIDTH}} {finding.fact}")
        if finding.remedy:
            lines.append(f"{'':<5} {'':<{_NAME_WIDTH}} -> {finding.remedy}")
    bad = sum(finding.state == "bad" for finding in findings)
    notes = sum(finding.state == "note" for finding in findings)
    end = f"ssd could not start: {bad} of {len(findings)} lines are bad" if bad else "ssd can start"
    return "\n".join([*lines, "", f"{end}, {notes} to note" if notes else end])


def gib(count: float) -> str:
    """Bytes in words."""
    return f"{count / GIB:.2f} GiB" if count < 10 * GIB else f"{count / GIB:.0f} GiB"
