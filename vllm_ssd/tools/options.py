"""Adds options to the commands' argument parsers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def add_option(
    group: Any,
    flag: str,
    about: str,
    read: Callable[[str], Any] = str,
    default: Any = None,
    **further: Any,
) -> None:
    """Add an option to a group of argparse. flag: its names and the word for its value, such as
    "--limit SECONDS". about: its help text; a default that is not None is added to it."""
    *names, metavar = flag.split(" ")
    if default is not None:
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        about = f"{about} Default: {shown}."
    group.add_argument(*names, type=read, metavar=metavar, default=default, help=about, **further)
