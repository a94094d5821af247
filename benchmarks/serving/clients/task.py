"""What every client of a server is given, and what it must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.serving.records import Load, Seen


@dataclass(frozen=True)
class Task:
    """A load on the server at a URL. tokenizer: folder or hub name of the target. prompts: a text
    for each request, the chat template included; of several turns, with `ANSWER` where an answer of
    the server's belongs. scratch: an empty folder for files."""

    url: str
    tokenizer: str
    load: Load
    prompts: Sequence[str]
    scratch: Path


class Client(Protocol):
    """A program that puts a server under load."""

    def check(self) -> None:
        """Raises `ValueError` with a sentence if the client cannot run here."""

    def measure(self, task: Task) -> Seen:
        """Run a load. `ClientFailed` if a request fails."""


class ClientFailed(Exception):
    """The client failed, or the server failed it; with the last words."""
