"""Servers of the chat's own, for those who have none running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.server import Server

START_LIMIT_S = 1800.0  # a large model is downloaded and compiled in this time


@contextmanager
def started(
    console: Console, sides: dict[str, dict[str, Any]], logs: Path
) -> Iterator[dict[str, str]]:
    """One server after the other for these arguments of vLLM's ``LLM``, by name; their addresses.
    All are ended at the end. Raises ``ServerFailed`` with the last words of one that does not
    start; everything they say is in logs/NAME.log."""
    urls = {}
    with ExitStack() as stack:
        for name, arguments in sides.items():
            with console.status(f"starting {name}, which takes half a minute and more"):
                server = stack.enter_context(Server(arguments, logs / f"{name}.log"))
                server.wait_healthy(START_LIMIT_S)
            urls[name] = server.url
        yield urls
