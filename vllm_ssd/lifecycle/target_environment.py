"""What the target's workers are told by environment variables, which they inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping


class TargetEnvironment:
    """This process's environment is the workers' from ``set`` on, and its own again after
    ``restore``: what is started later is another engine's."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def set(self, values: Mapping[str, str]) -> None:
        """To be called once before ``restore``."""
        for name, value in values.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value

    def restore(self) -> None:
        """A second call does nothing."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()
