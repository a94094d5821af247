"""Ends the command ``vllm`` with the sentence of an error of ssd's, without a page of traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from types import TracebackType

_PACKAGE = str(Path(__file__).parents[1])


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """If this raises an error of ssd's and the error ends the command, only its sentence is
    printed. ``VLLM_LOGGING_LEVEL=DEBUG`` shows the traceback, too."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if _is_command() and _is_ours(error) and os.environ.get("VLLM_LOGGING_LEVEL") != "DEBUG":
            _print_only_sentence_of(error)
        raise


def _is_command() -> bool:
    """Whether this process is ``vllm serve`` or the like, and not a program of the user's."""
    program = sys.argv[0] if sys.argv else ""
    return Path(program).name == "vllm" or "/vllm/entrypoints/" in program


def _is_ours(error: Exception) -> bool:
    """Whether a ``raise`` of this package made the error. A bug raises in a call."""
    last = extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(_PACKAGE) and (last.line or "").startswith("raise ")


def _print_only_sentence_of(error: Exception) -> None:
    usual = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is error:
            print(f"vllm: error: {error}", file=sys.stderr)
        else:
            usual(kind, value, trace)

    sys.excepthook = hook
