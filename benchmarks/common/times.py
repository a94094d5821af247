"""When engines and servers began, were ready and ended: a line of JSON each, in the file that
``SSD_TIMES`` names, from all processes that start any. Without it nothing is written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

FILE = "SSD_TIMES"


class Times:
    """Of one engine or server, from now on."""

    def __init__(self, what: str):
        self._what = what
        self._begin = time.time()
        self._ready = 0.0

    def ready(self) -> None:
        self._ready = self._ready or time.time()

    def ended(self) -> None:
        """Written once; ready is 0 if it never was."""
        if FILE not in os.environ or not self._begin:
            return
        now, begin = time.time(), self._begin
        self._begin = 0.0
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        line = {"what": self._what, "test": test, "begin": begin, "ready": self._ready, "end": now}
        with Path(os.environ[FILE]).open("a") as file:
            file.write(json.dumps(line) + "\n")
