"""Outcomes in a file, a line of JSON each, written as soon as they are there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vllm_ssd.tune.records import Candidate, Outcome, Setting


class _Line(msgspec.Struct):
    """setting: its digest. machine, versions: for who reads the file."""

    setting: str
    machine: str
    versions: str
    outcome: Outcome


class Results:
    """Of one setting, which may share its file with others. Raises ``ValueError`` with a sentence
    if the file has something else in it."""

    def __init__(self, path: Path, setting: Setting):
        self._path = path
        self._setting = setting
        self._digest = setting.digest()
        self._known: dict[Candidate, Outcome] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                saved = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"{path} is not a file of vllm-ssd tune ({error}): name another with --results"
                ) from None
            if saved.setting == self._digest:
                self._known[saved.outcome.candidate] = saved.outcome

    def of(self, candidate: Candidate) -> Outcome | None:
        """What was measured of it, in this call or before."""
        return self._known.get(candidate)

    def all(self) -> list[Outcome]:
        """In the order in which they were measured."""
        return list(self._known.values())

    def add(self, outcome: Outcome) -> None:
        """Save it, unless it failed: another call is to try it again."""
        self._known[outcome.candidate] = outcome
        if outcome.error is not None:
            return
        about = self._setting
        line = _Line(self._digest, about.machine, about.versions, outcome)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
