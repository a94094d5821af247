"""The names of draft services, by which engines of the same user find them.

A service has its name in a file of its run directory, beside what its engines must have in common
with it. So the name is as private as the directory, and goes with it, however the service ends.
Several drafts of one service have a run directory each.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import msgspec

from vllm_ssd.protocol import rundir

# Of services that users start. Those of data parallel groups have names that do not match it.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_FILE = "draft-server.json"  # in the run directory


class DraftName(msgspec.Struct, frozen=True):
    """options: of ``--speculative-config``, which all engines have in common with the service.
    service: which one it is, whose drafts share the name."""

    name: str
    options: dict[str, Any]
    service: str = msgspec.field(default_factory=lambda: secrets.token_hex(4))


def publish(run_dir: Path, named: DraftName) -> None:
    """Have engines find the service with this run directory; ``ValueError`` with a sentence if
    another one has the name. Of two that publish it at the same time neither may get it."""
    new = run_dir / f"{_FILE}.new"
    new.write_bytes(msgspec.json.encode(named))
    new.rename(run_dir / _FILE)  # so that nobody reads half of it
    for other, about in _published():
        if about.name == named.name and about.service != named.service:
            raise ValueError(
                f"there is a draft server {named.name!r} already, in {other}: stop it, or choose "
                "another --name"
            )


def find(name: str) -> tuple[Path, DraftName]:
    """The run directory of a draft with this name, and what its service has published;
    ``ValueError`` as ``find_all``."""
    return find_all(name)[0]


def find_all(name: str) -> list[tuple[Path, DraftName]]:
    """The same of all drafts with this name, at least one; ``ValueError`` with a sentence if there
    is none."""
    published = _published()
    found = [(run_dir, about) for run_dir, about in published if about.name == name]
    if found:
        return found
    names = {about.name for _, about in published if re.match(NAME, about.name)}
    others = f"running: {', '.join(sorted(names))}" if names else "none is running"
    raise ValueError(
        f"this user has no draft server {name!r} on this machine ({others}): start it with "
        f"'vllm-ssd draft MODEL --name {name}', or write another name as draft_server"
    )


def _published() -> list[tuple[Path, DraftName]]:
    """Of all services that run."""
    found = []
    for run_dir in rundir.living():
        try:
            about = msgspec.json.decode((run_dir / _FILE).read_bytes(), type=DraftName)
        except (OSError, msgspec.DecodeError):
            continue  # an engine's, stopping right now, or of another version of this package
        found.append((run_dir, about))
    return found
