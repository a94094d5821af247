"""The table of docs/dev/upstream-tests.md: ``python -m tests.upstream.table``."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from .listed import FILES

RESULTS = Path(__file__).parents[2] / ".upstream" / "results.json"


def rows(results: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """The table's lines: a file, and how many of its tests passed."""
    yield "| file of vLLM's `tests` | passed |"
    yield "|---|---|"
    for file in FILES.values():
        found = results.get(file.path, {})
        passed, failed = (found.get(outcome, 0) for outcome in ("passed", "failed"))
        yield f"| `{file.path}` | {f'{passed} of {passed + failed}' if found else 'not run'} |"


if __name__ == "__main__":
    print("\n".join(rows(json.loads(RESULTS.read_text()))))
