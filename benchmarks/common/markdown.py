"""Markdown tables."""

from collections.abc import Sequence


def table_row(cells: Sequence[str]) -> str:
    """A line of one."""
    return f"| {' | '.join(cells)} |"


def table_head(columns: Sequence[str]) -> str:
    """Its first two lines."""
    return f"{table_row(columns)}\n{table_row(['---'] * len(columns))}"
