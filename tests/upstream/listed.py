"""The list of vLLM's tests that are run with method ssd: ``tests.toml``."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LIST = Path(__file__).with_name("tests.toml")


@dataclass(frozen=True)
class File:
    """A file of vLLM's ``tests``. exclude: why a test is not run, by a part of its name. short:
    whether it is run in the short run. plain: by a part of a test's name, how many
    engines without speculation stay so, as the test compares others with them. no_drafts: why its
    engines verify none; without that they must."""

    path: str
    short: bool = False
    exclude: Mapping[str, str] = field(default_factory=dict)
    plain: Mapping[str, int] = field(default_factory=dict)
    no_drafts: str = ""

    def runs(self, test: str) -> bool:
        """Whether a test of this name and with these parameters is run."""
        return not any(part in test for part in self.exclude)

    @property
    def steps(self) -> set[str]:
        """What its engines with ssd must come to."""
        return {"engine"} if self.no_drafts else {"engine", "verified", "accepted"}

    def plain_engines(self, test: str) -> int:
        """How many of its first engines without speculation stay so."""
        return next((number for part, number in self.plain.items() if part in test), 0)


def _read() -> tuple[dict[str, str], dict[str, File]]:
    content: dict[str, Any] = tomllib.loads(_LIST.read_text())
    names = {
        name: model for model, all_names in content.pop("models").items() for name in all_names
    }
    files = {}
    for path, entry in content.items():
        files[path] = File(path, **entry)
    return names, files


MODELS, FILES = _read()
