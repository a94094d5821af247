"""A program in a pseudo terminal: what it writes, and what is typed."""

import codecs
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[=>])")  # colours and moves of the cursor
COLUMNS, LINES = 120, 40


class Terminal:
    """The terminal of a running program."""

    def __init__(self, side: int, process: subprocess.Popen[bytes]):
        self.process = process
        self._side = side
        self._seen = ""
        # A read may end within a character.
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def expect(self, pattern: str, limit_s: float = 60) -> re.Match[str]:
        """Wait for what the pattern matches, after what was expected before; an assertion with all
        that was written since if it does not come."""
        deadline = time.monotonic() + limit_s
        while True:
            found = re.search(pattern, self._seen)
            if found:
                self._seen = self._seen[found.end() :]
                return found
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._side], [], [], left)[0]
            assert ready, f"no {pattern!r} within {limit_s:g} s:\n{self._seen}"
            self._seen = _ESCAPES.sub("", self._seen + self._decode(os.read(self._side, 65536)))


@contextmanager
def terminal(command: Sequence[str], environment: dict[str, str]) -> Iterator[Terminal]:
    """Run a command in a terminal; killed at the end if it still runs."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", **environment},
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours, process)
        finally:
            process.kill()
            os.close(ours)
