"""Environment variables for the target's workers, which inherit them from the engine core."""

from __future__ import annotations

import os
from collections.abc import Mapping


class TargetEnvironment:
    """Changes this process's environment for its workers with ``set``, and undoes that with
    ``restore``: processes started later belong to another engine."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def set(self, values: Mapping[str, str]) -> None:
        """Set the variables. Call it once before ``restore``."""
        for name, value in values.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value

    def restore(self) -> None:
        """Restore the former values; a second call does nothing."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()
