"""The table of docs/vllm-spec-tests.md: ``python -m tests.upstream.table``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from .listed import FILES, File

RESULTS = Path(__file__).parents[2] / ".upstream" / "results.json"


def rows(results: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """The table's lines: a file, how many of its tests passed, and what is left out and why."""
    yield "| file of vLLM's `tests` | passed | left out, and why |"
    yield "|---|---|---|"
    for file in FILES.values():
        found = results.get(file.path, {})
        passed, failed = (found.get(outcome, 0) for outcome in ("passed", "failed"))
        count = f"{passed} of {passed + failed}" if found else "not run"
        yield f"| `{file.path}` | {count} | {reasons(file)} |"


def reasons(file: File) -> str:
    """In one cell: what is left out, and whether there are no drafts."""
    texts = [f"`{part}`: {why}" for part, why in file.exclude.items()]
    return " ".join([*texts, *([f"No drafts: {file.no_drafts}"] if file.no_drafts else [])])


if __name__ == "__main__":
    print("\n".join(rows(json.loads(RESULTS.read_text()))))
