"""From what was measured to the figures that are compared, and to a table of them."""

from collections.abc import Callable, Sequence
from itertools import takewhile

import msgspec

from benchmarks.common.markdown import table_row
from benchmarks.common.records import Kind, Measurement, Result


class Row(msgspec.Struct, frozen=True):
    """One side at one batch size. over_*: ratios of tokens/s, at the same batch size and
    temperature, to plain vLLM, to vLLM's draft_model at its best k, to ours with f=0 at its best k.
    verify_ms: milliseconds of an engine step that verifies k drafts of each request and waits for
    no draft model. text: compared with plain vLLM's, if greedy. None: not measured, or not to be
    had."""

    side: str
    batch: int
    temperature: float
    tokens_per_s: float
    over_ar: float | None
    over_draft_model: float | None
    over_f0: float | None
    tokens_per_s_gpu: float | None
    tokens_per_round: float
    ms_per_round: float
    verify_ms: float | None
    acceptance: list[float] | None
    hit: float | None
    miss: float | None
    late: float | None
    wait_ms: float | None
    glue_ms: float | None
    step_ms: float | None
    text: str | None


def make_rows(results: Sequence[Result]) -> list[Row]:
    """A row for every measurement, by batch size, temperature and then the order of the sides."""
    rows = [
        _row(result, measurement, results)
        for result in results
        for measurement in result.measurements
    ]
    return sorted(rows, key=lambda row: (row.batch, row.temperature))


def _row(result: Result, measured: Measurement, results: Sequence[Result]) -> Row:
    side = result.side
    speculation = measured.speculation

    def figure(name: str) -> float | None:
        return getattr(speculation, name, None)

    def over(kind: Kind) -> float | None:
        rates = [_rate(other) for _, other in _beside(measured, results, kind)]
        return _rate(measured) / max(rates) if rates else None

    verified = [other for k, other in _beside(measured, results, "verify") if k == side.k]
    # Sampled texts differ by chance.
    greedy = measured.temperature == 0
    plain = [other.texts for _, other in _beside(measured, results, "ar") if greedy]
    return Row(
        side=side.name,
        batch=measured.batch,
        temperature=measured.temperature,
        tokens_per_s=_rate(measured),
        over_ar=over("ar"),
        over_draft_model=over("draft_model"),
        over_f0=over("sd"),
        tokens_per_s_gpu=_rate(measured) / side.gpus if side.gpus else None,
        tokens_per_round=measured.round_tokens / measured.rounds,
        ms_per_round=_step_ms(measured),
        verify_ms=_step_ms(verified[0]) if verified else None,
        acceptance=speculation.acceptance if speculation else None,
        hit=figure("hit"),
        miss=figure("miss"),
        late=figure("late"),
        wait_ms=figure("wait_ms"),
        glue_ms=figure("glue_ms"),
        step_ms=figure("step_ms"),
        text=compare(plain[0], measured.texts) if plain and side.kind != "ar" else None,
    )


def _beside(
    one: Measurement, results: Sequence[Result], kind: Kind
) -> list[tuple[int, Measurement]]:
    """(k, measurement) of all sides of a kind at the batch size and temperature of one."""
    return [
        (result.side.k, measurement)
        for result in results
        if result.side.kind == kind
        for measurement in result.measurements
        if (measurement.batch, measurement.temperature) == (one.batch, one.temperature)
    ]


def _rate(measured: Measurement) -> float:
    return measured.tokens / measured.seconds


def _step_ms(measured: Measurement) -> float:
    return 1000 * measured.step_seconds / measured.steps


def compare(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> str:
    """Whether texts (token ids) are the same; if not, the number of texts that differ, and after
    which number of tokens the first of these does."""
    parting = [
        (number, len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, two)))))
        for number, (one, two) in enumerate(zip(plain, other, strict=True), start=1)
        if one != two
    ]
    if not parting:
        return "identical"
    number, place = parting[0]
    return f"{len(parting)} of {len(plain)} part, text {number} after {place} tokens"


def _number(digits: int) -> Callable[[Row, str], str]:
    def show(row: Row, field: str) -> str:
        value = getattr(row, field)
        return "–" if value is None else f"{value:.{digits}f}"

    return show


def _shares(row: Row, _: str) -> str:
    if row.hit is None or row.miss is None or row.late is None:
        return "–"
    return f"{row.hit:.0%} / {row.miss:.0%} / {row.late:.0%}"


def _acceptance(row: Row, _: str) -> str:
    return " ".join(f"{share:.2f}" for share in row.acceptance or []) or "–"


def _text(row: Row, field: str) -> str:
    value = getattr(row, field)
    return "–" if value is None else str(value)


COLUMNS: dict[str, tuple[str, Callable[[Row, str], str]]] = {
    "batch": ("batch", _text),
    "T": ("temperature", _text),
    "side": ("side", _text),
    "tokens/s": ("tokens_per_s", _number(1)),
    "x AR": ("over_ar", _number(2)),
    "x draft_model": ("over_draft_model", _number(2)),
    "x f=0": ("over_f0", _number(2)),
    "tokens/s/GPU": ("tokens_per_s_gpu", _number(1)),
    "tokens/round": ("tokens_per_round", _number(2)),
    "ms/round": ("ms_per_round", _number(2)),
    "verify alone ms": ("verify_ms", _number(2)),
    "accepted >= 1, 2, ..": ("acceptance", _acceptance),
    "hit / miss / late": ("hit", _shares),
    "wait ms": ("wait_ms", _number(2)),
    "glue ms": ("glue_ms", _number(2)),
    "step ms": ("step_ms", _number(2)),
    "text": ("text", _text),
}


def markdown(rows: Sequence[Row], failed: Sequence[Result]) -> str:
    """The table, then what failed and its last words."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    lines += [[show(row, field) for field, show in COLUMNS.values()] for row in rows]
    empty = dict.fromkeys(COLUMNS, "–")
    for result in failed:
        cells = {**empty, "side": result.side.name, "tokens/s": "failed"}
        lines.append(list(cells.values()))
    table = [table_row(cells) for cells in lines]
    for result in failed:
        table += ["", f"{result.side.name} failed:", "", "```", result.error or "", "```"]
    return "\n".join(table)
