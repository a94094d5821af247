"""The names of draft services, by which engines of the same user find them.

A service writes its name into a file of its run directory, with the options that its engines must
share. So the name is as private as the directory and goes with it, however the service ends. Each
draft of a service has a run directory of its own.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Literal

import msgspec

from vllm_ssd.table import rundir
from vllm_ssd.table.messages import UNREADABLE

# Matches the names of services that users start, and none of data parallel groups' services.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_FILE = "draft-server.json"  # in the run directory


class CommonOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of ``--speculative-config`` that a service fixes for all its engines. An engine takes
    no other option from a service."""

    model: str
    revision: str | None
    code_revision: str | None
    k: int
    f: int
    draft_sample_method: Literal["greedy", "probabilistic"]
    draft_top_m: int | None
    saguaro: float
    max_model_len: int | None


class DraftName(msgspec.Struct, frozen=True):
    """A service's name, and what engines compare with it. options: None for the service of a data
    parallel group, whose engines have the same config. service: a random identifier; all drafts of
    one service have the same."""

    name: str
    options: CommonOptions | None
    service: str = msgspec.field(default_factory=lambda: secrets.token_hex(4))


class NoDraftServer(ValueError):
    """No draft server with this name answers yet."""


def publish(run_dir: Path, named: DraftName) -> None:
    """Let engines find the service by its name; ``ValueError`` with a sentence if another service
    has the name. If two services publish one name at the same time, both may be refused."""
    new = run_dir / f"{_FILE}.new"
    new.write_bytes(msgspec.json.encode(named))
    new.rename(run_dir / _FILE)  # so that engines never read half of it
    for other, about in _published()[0]:
        if about.name == named.name and about.service != named.service:
            raise ValueError(
                f"there is a draft server {named.name!r} already, in {other}: stop it, or choose "
                "another --name"
            )


def find_all(name: str) -> list[tuple[Path, DraftName]]:
    """The run directories of all drafts with this name, each with what its service has published;
    ``NoDraftServer`` with a sentence if there is none."""
    published, unreadable = _published()
    found = [(run_dir, about) for run_dir, about in published if about.name == name]
    if found:
        return found
    names = {about.name for _, about in published if re.match(NAME, about.name)}
    where = f"running in the temporary folder {rundir.base()}"
    others = f"{where}: {', '.join(sorted(names))}" if names else f"none is {where}"
    if unreadable:
        others += f"; another version of vllm-ssd runs the one in {unreadable[0]}"
    raise NoDraftServer(
        f"this user has no draft server {name!r} on this machine ({others}): start it with "
        f"'vllm-ssd draft MODEL --name {name}', or write another name as draft_server"
    )


def _published() -> tuple[list[tuple[Path, DraftName]], list[str]]:
    """The run directories of all running drafts, each with what its service has published; and
    those with something that cannot be read, each with the reason."""
    found, unreadable = [], []
    for run_dir in rundir.living():
        try:
            about = msgspec.json.decode((run_dir / _FILE).read_bytes(), type=DraftName)
        except OSError:
            continue  # an engine's, or one that stops now
        except UNREADABLE as error:
            unreadable.append(f"{run_dir} ({error})")
            continue
        found.append((run_dir, about))
    return found, unreadable
