"""The file of all figures and texts, which later runs can add to."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.common.records import Result
from benchmarks.offline.table import make_rows


def save_results(path: Path, about: Mapping[str, str], results: Sequence[Result]) -> None:
    """Write the results with the rows of their table. about: what a reader must know of them."""
    record = {"about": about, "rows": make_rows(results), "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def read_results(path: Path) -> list[Result]:
    """Read the results that `save_results` has written."""
    record = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    return msgspec.json.decode(record["results"], type=list[Result])
