"""The speculation tables of a server's engines, for readers in a frontend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_ssd.log import get_logger
from vllm_ssd.protocol import SpeculationTable

logger = get_logger(__name__)


class EngineTables:
    """Yields each engine's index in the data parallel group and its table, in this order. Opens
    tables on first use. Skips engines on other machines."""

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
    except (OSError, ValueError) as error:  # for example, the engine is on another machine
        logger.warning("SSD: no metrics of an engine whose table cannot be read here: %s", error)
        return None
