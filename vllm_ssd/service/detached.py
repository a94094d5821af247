"""Starts a process that outlives its parent for as long as it needs to clean up.

vLLM kills a process that is slow to stop, together with its children. So a detached process has a
session of its own and no parent. It shares a socket pair with the process that started it: the
socket closes however that process ends. First it gets its settings there, as a line of JSON, which
other users cannot read. Then it sends lines of JSON, each ``{kind: text}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Settings = TypeVar("Settings")

# Variables whose paths may be relative to the working directory.
_OF_PATHS = ("PYTHONPATH", "HF_HOME", "HF_HUB_CACHE")


def start_detached(
    module: str, folder: Path, settings: Any, keep: Iterable[int] = ()
) -> tuple[socket.socket, int]:
    """Start ``python -m module`` in ``folder``; the module calls ``detach``. Returns the channel to
    it and its process group. settings: a dataclass or a struct of msgspec. keep: file descriptors
    that it inherits. Python imports from the working directory first, and Ray passes it on, so
    ``folder`` is one of ours."""
    line = msgspec.json.encode(settings) + b"\n"  # if that fails, no process waits for it
    channel, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            cwd=folder,
            env=os.environ | absolute_paths(os.environ),
            pass_fds=(theirs.fileno(), *keep),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach the parent only
        )
    process.wait()  # until ``detach``; a process that fails earlier closes the channel
    with contextlib.suppress(ConnectionError):  # it has failed, and closed the channel
        channel.sendall(line)
    return channel, process.pid


def detach(kind: type[Settings]) -> tuple[socket.socket, Settings]:
    """Leave the parent of this process. Returns the channel, whose descriptor is the argument from
    ``start_detached``, and the settings. kind: their type."""
    if os.fork():
        os._exit(0)
    channel = socket.socket(fileno=int(sys.argv[1]))
    if not (line := channel.makefile("rb").readline()).endswith(b"\n"):
        sys.exit("SSD: the process that started this one was killed before it had said what to do")
    return channel, msgspec.json.decode(line, type=kind)


def say(channel: socket.socket, kind: str, text: str) -> None:
    """Send a line to the process that started this one, unless that has gone."""
    with contextlib.suppress(BrokenPipeError):
        channel.sendall(json.dumps({kind: text}).encode() + b"\n")


def words(channel: socket.socket) -> Iterator[tuple[str, str]]:
    """Kind and text of each line of a detached process, until it ends."""
    with channel.makefile("rb") as lines, contextlib.suppress(ConnectionResetError):
        for line in lines:
            if line.endswith(b"\n"):  # else the process was killed in the middle of it
                yield next(iter(json.loads(line).items()))


def is_closed(channel: socket.socket, seconds: float | None = 0) -> bool:
    """Wait for ``seconds``, None = for ever, and return whether the other side, which sends nothing
    more, has closed the channel. If it has, return at once."""
    # ``select`` would refuse a channel with a number above 1023, as processes with many files have.
    closed = select.poll()
    closed.register(channel, select.POLLIN)
    return bool(closed.poll(None if seconds is None else seconds * 1000))


def absolute_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold paths, with absolute paths for use from another working directory.
    Leaves out empty paths, which mean the working directory."""
    return {
        name: os.pathsep.join(
            os.path.abspath(os.path.expanduser(path))
            for path in environment[name].split(os.pathsep)
            if path
        )
        for name in _OF_PATHS
        if environment.get(name)
    }
