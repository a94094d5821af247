"""The tables of docs/compatibility.md: ``python -m tests.support.compatibility``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LIST: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_WHERE = {"engine": "CPU:", "gpu": "GPU:", "unit": "unit:"}


def tables() -> Iterator[str]:
    """The page's lines: a heading and a table for each part of the list."""
    for part, rows in LIST.items():
        yield from ("", f"## {part}", "", "| what | state | shown by, or said |", "|---|---|---|")
        for what, known in rows.items():
            state, shown = _cells(known)
            yield f"| {what} | {state} | {shown} |"


def _cells(known: Mapping[str, Any]) -> tuple[str, str]:
    note = f"; {known['note']}" if "note" in known else ""
    if "works" in known:
        return f"works{note}", ", ".join(map(_link, known["works"]))
    if "refused" in known:
        return f"refused{note}", f'"{": ".join(part.strip() for part in known["refused"])}"'
    if "refused_by_vllm" in known:
        return f"refused by vLLM{note}", _link(known["refused_by_vllm"])
    about = known["untested"]
    return "untested", "" if about is True else about


def _link(test: str) -> str:
    file, name = test.split("::")
    return f"{_WHERE[file.partition('/')[0]]} [`{name}`](../tests/{file})"


def named_tests() -> list[str]:
    """All that the list names, as "tests/file.py::function"."""
    known = [row for rows in LIST.values() for row in rows.values()]
    found = [test for row in known for test in row.get("works", ())]
    found += [row["refused_by_vllm"] for row in known if "refused_by_vllm" in row]
    return [f"tests/{test}" for test in found]


def refusals() -> list[str]:
    """The parts of all sentences that the list has of ssd's own."""
    return sorted(
        {p for rows in LIST.values() for r in rows.values() for p in r.get("refused", ())}
    )


if __name__ == "__main__":
    print("\n".join(tables()))
