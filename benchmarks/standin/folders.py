"""Model folders that appear complete or not at all."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def say(text: str) -> None:
    """Print one line of progress to stderr; stdout stays free for results."""
    print(text, file=sys.stderr, flush=True)


def is_complete(folder: Path) -> bool:
    """Tell whether `build_once` has finished this folder: it has a config.json only if so."""
    return (folder / "config.json").is_file()


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `build` unless it is complete already.

    `build` gets an empty temporary folder next to `folder`, which is renamed when it returns. If
    it raises, Ctrl-C included, nothing is left. Of two processes that build the same folder, the
    first to finish wins and the other takes its result.

    Raises FileExistsError if `folder` holds files that are not a model.
    """
    if is_complete(folder):
        say(f"{folder}: there already")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} has files in it but no config.json; remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        # One level down, because the scratch folder itself is readable by its owner only.
        unfinished = Path(scratch) / folder.name
        unfinished.mkdir()
        build(unfinished)
        try:
            os.replace(unfinished, folder)
        except OSError:
            if not is_complete(folder):
                raise
    say(f"{folder}: ready")
    return folder
