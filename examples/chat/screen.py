"""How answers are shown: one as running text, two side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from examples.chat.answer import Answer

_REFRESHES_PER_SECOND = 12
_MARGIN_LINES = 6  # of the terminal's height: frame, summaries and the question


def show_one(console: Console, answers: Iterator[Answer]) -> Answer:
    """Write an answer as it comes, and the summary under it. Ctrl-C ends the answer only."""
    answer, shown = Answer(), 0
    try:
        for answer in answers:
            console.out(answer.text[shown:], end="", highlight=False)
            shown = len(answer.text)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
        return answer
    console.print(f"\n{answer.summary()}", style="dim")
    return answer


def show_beside(
    console: Console, titles: Sequence[str], streams: Sequence[Callable[[], Iterator[Answer]]]
) -> list[Answer]:
    """Ask all at once and show their answers beside each other as they come; Ctrl-C ends them.
    Raises what a stream raises."""
    answers = [Answer() for _ in streams]
    stopped = Event()

    def follow(place: int) -> None:
        for answer in streams[place]():
            answers[place] = answer
            if stopped.is_set():
                return

    with ThreadPoolExecutor(len(streams)) as pool:
        futures = [pool.submit(follow, place) for place in range(len(streams))]
        with Live(console=console, auto_refresh=False, transient=True) as live:
            height = max(console.height - _MARGIN_LINES, 3)
            try:
                while wait(futures, 1 / _REFRESHES_PER_SECOND).not_done:
                    live.update(_beside(titles, answers, height), refresh=True)
            except KeyboardInterrupt:
                stopped.set()
    for future in futures:
        future.result()
    console.print(_beside(titles, answers, None))
    if all(answer.tokens for answer in answers):
        said = "same text" if answers[0].text == answers[1].text else "texts differ"
        first, second = (answer.tokens_per_second for answer in answers)
        if first and second:  # an answer in one piece has no speed
            said = f"{titles[0]}: {first / second:.2f} times {titles[1]}; {said}"
        console.print(said, style="bold")
    return answers


def _beside(titles: Sequence[str], answers: Sequence[Answer], height: int | None) -> Table:
    """height: the most lines of each answer, its last ones; None: all."""
    grid = Table.grid(expand=True)
    for _ in titles:
        grid.add_column(ratio=1)
    panels = []
    for title, answer in zip(titles, answers):
        body = Text(answer.text)
        summary = Text(answer.summary() if answer.tokens else "writing", style="dim")
        shown = body if height is None else _Tail(body, height)
        panels.append(Panel(Group(shown, summary), title=title))
    grid.add_row(*panels)
    return grid


class _Tail:
    """The last lines of a text, however it is wrapped."""

    def __init__(self, text: Text, lines: int):
        self._text = text
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._text, options, pad=False)[-self._lines :]:
            yield from line
            yield Segment.line()
