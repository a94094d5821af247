"""All sides' figures beside those of plain vLLM."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.serve.client import Figures

_HEAD: tuple[str, ...] = (
    "clients",
    "T",
    "side",
    "tokens/s",
    "x plain",
    "TTFT p50 ms",
    "x plain",
    "TTFT p99 ms",
)
_HEAD += ("x plain", "longest gap p50 ms", "x plain", "longest gap ms")


def markdown(sides: Mapping[str, Sequence[Figures]]) -> str:
    """A table. sides: by name, plain vLLM as "plain" if it was measured; figures of all sides are
    of the same loads, in the same order."""
    plain = {_load(figures): figures for figures in sides.get("plain", ())}
    rows = [_HEAD, ("---",) * len(_HEAD)]
    loads = dict.fromkeys(_load(figures) for measured in sides.values() for figures in measured)
    for load in loads:
        for name, measured in sides.items():
            for figures in measured:
                if _load(figures) == load:
                    rows.append(_row(name, figures, plain.get(load)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _load(figures: Figures) -> tuple[int, float]:
    return figures.clients, figures.temperature


def _row(name: str, figures: Figures, plain: Figures | None) -> tuple[str, ...]:
    def ratio(of: Callable[[Figures], float]) -> str:
        if plain is None or name == "plain" or not of(plain):
            return "–"
        return f"{of(figures) / of(plain):.2f}"

    p50, p99 = figures.ttft_ms
    gap, longest = figures.gap_ms
    return (
        str(figures.clients),
        f"{figures.temperature:g}",
        name,
        f"{figures.tokens_s:.1f}",
        ratio(lambda seen: seen.tokens_s),
        f"{p50:.0f}",
        ratio(lambda seen: seen.ttft_ms[0]),
        f"{p99:.0f}",
        ratio(lambda seen: seen.ttft_ms[1]),
        f"{gap:.0f}",
        ratio(lambda seen: seen.gap_ms[0]),
        f"{longest:.0f}",
    )
