"""How the commands declare their options."""

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
    """Add an option to a group of argparse. flag: its names and the word for its value, as in
    "--limit SECONDS". about: its help, to which the default is added unless that is None."""
    *names, metavar = flag.split(" ")
    if default is not None:
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        about = f"{about} Default: {shown}."
    group.add_argument(*names, type=read, metavar=metavar, default=default, help=about, **further)
