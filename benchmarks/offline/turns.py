"""Engines that start at the same time and are measured one after the other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """For ``count`` engines, each with a thread of its own. An engine that is measured has the
    machine to itself but for engines that are up and idle."""

    def __init__(self, count: int):
        self._starting = count
        self._changed = threading.Condition()
        self._one = threading.Lock()

    def started(self) -> None:
        """One engine is up, or will never be: to be called once for each."""
        with self._changed:
            self._starting -= 1
            self._changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Once no engine is starting any more, and no other has its turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._starting <= 0)
        with self._one:
            yield
