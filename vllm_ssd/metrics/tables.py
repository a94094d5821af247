"""The tables of a server's engines, for those who read them in a frontend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_ssd.log import get_logger
from vllm_ssd.protocol import SpeculationTable

logger = get_logger(__name__)


class EngineTables:
    """By the engines' places in the data parallel group; opened when they are first asked for, and
    without those of engines that are not on this machine."""

    def __init__(self, paths: Mapping[int, Path]):
        self._paths = paths
        self._tables: dict[Path, SpeculationTable | None] = {}

    def __iter__(self) -> Iterator[tuple[int, SpeculationTable]]:
        for engine, path in sorted(self._paths.items()):
            if path not in self._tables:
                self._tables[path] = _open(path)
            table = self._tables[path]
            if table is not None:
                yield engine, table


def _open(path: Path) -> SpeculationTable | None:
    try:
        return SpeculationTable.open(path, writable=False)
    except (OSError, ValueError) as error:  # of an engine on another machine, for example
        logger.warning("SSD: no metrics of an engine whose table cannot be read here: %s", error)
        return None
