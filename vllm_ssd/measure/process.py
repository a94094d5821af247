"""A process that measures one engine: what it is told, what it tells, and how it ends.

So an engine's memory is back before the next one starts, and its environment is its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import msgspec

LAST_LINES = 15
Order = TypeVar("Order")


def obey(kind: type[Order], measure: Callable[[Order, TextIO], None]) -> NoReturn:
    """The process itself: take an order of this kind from stdin, measure, end. measure: gets the
    order and where its events go, a line each."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as events:
        try:
            measure(order, events)
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine is down. What libraries do at an orderly end can take minutes on GPU machines.
    os._exit(status)


class Measuring:
    """``python -m MODULE FD``, as a context: when it is left, the process is gone, and all it has
    started but the draft's keeper, which leaves its session and ends when the engine does.

    It gets one line on stdin, ``told``, and writes lines to the file descriptor FD. log: gets
    everything that vLLM prints. environment: added to this process's. After ``limit_s`` seconds it
    is killed.
    """

    def __init__(
        self, module: str, told: bytes, environment: Mapping[str, str], log: Path, limit_s: float
    ):
        self._command = [sys.executable, "-m", module]
        self._told = told
        self._environment = {**os.environ, **environment}
        self._log = log
        self._limit_s = limit_s
        self._held = ExitStack()

    def __enter__(self) -> Measuring:
        events, theirs = os.pipe()
        output = self._held.enter_context(self._log.open("wb"))
        self._lines = self._held.enter_context(os.fdopen(events, "rb"))
        # A session of its own, so that nothing it has started outlives the limit.
        self._process = subprocess.Popen(
            [*self._command, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(theirs,),
            env=self._environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._limit = threading.Timer(self._limit_s, self._kill)
        self._limit.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._limit.cancel()
        self._kill()
        self._held.close()

    def lines(self) -> Iterator[bytes]:
        """What it tells, until it tells no more."""
        assert self._process.stdin is not None
        self._process.stdin.write(self._told + b"\n")
        self._process.stdin.flush()
        yield from self._lines

    def go_on(self) -> None:
        """End its stdin, for which it waits before it measures."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def error(self) -> str | None:
        """Wait for its end: why it failed, as a line and the last ones of its log; None if it did
        not."""
        status = self._process.wait()
        if status == 0:
            return None
        in_time = self._limit.is_alive()
        what = f"exit status {status}" if in_time else f"not done after {self._limit_s:g} s"
        tail = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([what, *tail])

    def _kill(self) -> None:
        """End the process and its session, if anything is left of them."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
