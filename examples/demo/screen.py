"""One question, and the answers of both sides beside each other while they are written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.demo.engine import Piece
from examples.demo.side import Side, Turn

COLOURS = {"hits": "green", "misses": "red", "late": "yellow"}
LEGEND = Text.assemble(
    *("Right: one colour for each round. ", ("Green", "green"), ": its draft tokens "),
    *("were ready (hit). ", ("Red", "red"), ": the draft had not predicted the outcome (miss). "),
    *(("Yellow", "yellow"), ": the draft came late."),
    style="dim",
)


@dataclass
class Pane:
    """One answer. begun: when it began to be written, seconds on the machine's clock; moved later
    to show the answer once more."""

    title: str
    pieces: list[Piece] = field(default_factory=list)
    asked: float = 0.0
    shown_from: float = 0.0

    def begin(self) -> None:
        self.asked = self.shown_from = time.monotonic()

    def again(self) -> None:
        """Show the answer from its beginning, as fast as it was written."""
        self.shown_from = time.monotonic()

    def until(self, now: float) -> Panel:
        """All that is shown at a time on the machine's clock."""
        passed = now - self.shown_from
        shown = [piece for piece in self.pieces if piece.at - self.asked <= passed]
        body = Text.assemble(*((piece.text, COLOURS.get(piece.look or "", "")) for piece in shown))
        tokens = sum(len(piece.token_ids) for piece in shown)
        told = f"{tokens} tokens, {shown[-1].at - self.asked:.1f} s" if shown else ""
        return Panel(Group(body, Text(told, style="dim")), title=self.title)


def show_exchange(
    console: Console, question: str, number: int, titles: Sequence[str], sides: Sequence[Side]
) -> list[Turn]:
    """Both sides answer one after the other, as they share the cores. While the second one writes,
    the first one's answer is shown once more at its own speed. Returns the turns."""
    panes = [Pane(title) for title in titles]

    def both() -> Group:
        grid = Table.grid(expand=True)
        now = time.monotonic()
        for _ in panes:
            grid.add_column(ratio=1)
        grid.add_row(*(pane.until(now) for pane in panes))
        return Group(Text(f"> {question}", style="bold"), grid, LEGEND)

    turns = []
    with Live(console=console, get_renderable=both, refresh_per_second=12):
        for pane, side in zip(panes, sides):
            for earlier in panes:
                earlier.again()
            pane.begin()
            turns.append(side.take_turn(number, pane.pieces.append))
        for pane in panes:
            pane.shown_from = pane.asked  # all of it
    if not console.is_terminal:
        console.line()  # rich ends the last line in terminals only
    return turns
