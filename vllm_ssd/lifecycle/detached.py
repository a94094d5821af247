"""Starts a process that outlives its parent for as long as it needs to clean up.

vLLM kills a process that is slow to stop, together with its children. So a detached process has a
session of its own and no parent. It shares a socket pair with the process that started it: the
socket closes however that process ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

# Variables whose paths may be relative to the working directory.
_OF_PATHS = ("PYTHONPATH", "HF_HOME", "HF_HUB_CACHE")


def start_detached(
    module: str, folder: Path, *arguments: str, keep: Iterable[int] = ()
) -> tuple[socket.socket, int]:
    """Start ``python -m module`` in ``folder``; the module calls ``detach``. Returns the channel to
    it and its process group. keep: file descriptors that it inherits. Python imports from the
    working directory first, and Ray passes it on, so ``folder`` is one of ours."""
    channel, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            cwd=folder,
            env=os.environ | absolute_paths(os.environ),
            pass_fds=(theirs.fileno(), *keep),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach the parent only
        )
    process.wait()  # until ``detach``; a process that fails earlier closes the channel
    return channel, process.pid


def detach(channel_fd: str) -> socket.socket:
    """Leave the parent of this process, and return the channel, whose descriptor is the first
    argument from ``start_detached``."""
    if os.fork():
        os._exit(0)
    return socket.socket(fileno=int(channel_fd))


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
