"""Data sets by their names on the command line: from a file, or from a folder of many."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.prompts import PASSAGES

BUILT_IN = "passages"
# The reference's variable. The folder has NAME/NAME_data_10000.jsonl for each data set, or
# NAME/question.jsonl, as Spec-Bench and EAGLE do.
FOLDER = "SSD_DATASET_DIR"


@dataclass(frozen=True)
class Dataset:
    """The questions of each chat, and in words where they are from."""

    name: str
    chats: list[list[str]]
    about: str


def find_dataset(name: str, turns: int) -> Dataset:
    """The data set called ``name``, in chats of so many turns: "passages", which comes with the
    benchmark; a FILE.jsonl; or a folder in `FOLDER`. Raises ValueError with a sentence if there is
    none, or none as long."""
    if name == BUILT_IN:
        about = f"{len(PASSAGES)} passages that come with the benchmark"
        return Dataset(name, [[text] for text in PASSAGES], about)
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
    chats = list(_chats(path, turns))
    if not chats:
        raise ValueError(f"{path} has fewer than {turns} questions")
    return Dataset(name, chats, f"{turns * len(chats)} questions, {about}")


def _in_folder(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    patterns = (f"{Path(name).name}_data_*.jsonl", "question.jsonl")
    files = [file for pattern in patterns for file in sorted(Path(folder, name).glob(pattern))]
    return files[0] if files else None


def _chats(path: Path, turns: int) -> Iterator[list[str]]:
    """Each begins with a line that no earlier one has, and goes on with the next lines where this
    has too few questions."""
    chat: list[str] = []
    for questions in _lines(path):
        chat += questions
        if len(chat) >= turns:
            yield chat[:turns]
            chat = []


def _lines(path: Path) -> Iterator[list[str]]:
    # Not splitlines, which also splits where texts have separators of other kinds.
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            match json.loads(line):
                case {"turns": [str(), *_] as texts}:
                    yield texts
                case {"text": str(text)} | {"prompt": str(text)} | {"question": str(text)}:
                    yield [text]
                case _:
                    raise ValueError
        except ValueError:
            keys = '"text", "prompt", "question" or "turns"'
            raise ValueError(f"{path}, line {number}, has no {keys}") from None
