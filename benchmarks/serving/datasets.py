"""Data sets by their names on the command line: from a file, or from the reference's folder."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.prompts import PASSAGES

BUILT_IN = "passages"
# The reference's variable. The folder has NAME/NAME_data_10000.jsonl for each data set.
FOLDER = "SSD_DATASET_DIR"


@dataclass(frozen=True)
class Dataset:
    """Questions, and in words where they are from."""

    name: str
    questions: list[str]
    about: str


def find_dataset(name: str) -> Dataset:
    """The data set called ``name``: "passages", which comes with the benchmark; a FILE.jsonl; or a
    folder in `FOLDER`. Raises ValueError with a sentence if there is none."""
    if name == BUILT_IN:
        return Dataset(name, PASSAGES, f"{len(PASSAGES)} passages that come with the benchmark")
    if name.endswith(".jsonl"):
        path, name, about = Path(name), Path(name).stem, name
        if not path.exists():
            raise ValueError(f"there is no file {path}")
    elif found := _in_folder(name):
        path, about = found, str(found)
    else:
        raise ValueError(
            f"no data set {name!r}: write {BUILT_IN}, FILE.jsonl or a folder's name in ${FOLDER}"
        )
    questions = list(_questions(path))
    return Dataset(name, questions, f"{len(questions)} questions, {about}")


def _in_folder(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    files = sorted(Path(folder).glob(f"{name}/{name}_data_*.jsonl")) if folder else []
    return files[0] if files else None


def _questions(path: Path) -> Iterator[str]:
    # Not splitlines, which also splits where texts have separators of other kinds.
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            entry = json.loads(line)
            yield entry["text"] if "text" in entry else entry["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f'{path}, line {number}, is not {{"text": "..."}}') from None
