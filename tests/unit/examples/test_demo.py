"""The demo: how it speculates by what steps cost, and what it says of both sides."""

import pytest

from examples.demo.busy import CoreTimes, taken
from examples.demo.engine import Piece
from examples.demo.plan import DRAFT_ROWS, KS, Costs, Plan, best_plan
from examples.demo.report import table, verdict
from examples.demo.side import Turn

COUNTERS = {"rounds": 4, "hits": 2, "misses": 1, "late": 1, "wait_us": 8000}
COUNTERS |= {"accepted": [0, 4], "ready": [1, 1]}
FREE, DEAR = dict.fromkeys(range(1, 9), 0.1), {rows: 0.1 * rows for rows in range(1, 9)}


@pytest.mark.parametrize(
    "target, draft_ms, bfloat16_ms, fits",
    [
        (FREE, 2, 1, lambda plan: (plan.k, plan.f) == (KS[-1], 2) and plan.gain > 3),
        (DEAR, 2, 1, lambda plan: plan.k == KS[0] and plan.gain < 1),
        (FREE, 40, 20, lambda plan: plan.draft_dtype == "bfloat16"),
        (FREE, 40, 120, lambda plan: plan.draft_dtype == "float32" and plan.k < KS[-1]),
    ],
)
def test_the_plan_follows_from_what_steps_cost(target, draft_ms, bfloat16_ms, fits):
    """target: seconds, by rows; the draft's rows are free."""
    draft = {"float32": draft_ms, "bfloat16": bfloat16_ms}
    of_rows = {name: dict.fromkeys(DRAFT_ROWS, ms / 1000) for name, ms in draft.items()}
    assert fits(best_plan(Costs(plain=0.1, target=target, draft=of_rows)))


def turns(*speeds: float, taken: float = 0.0, token: int = 1) -> list[Turn]:
    """Of ten tokens after the first one, at these many a second."""
    return [
        Turn(
            [Piece("a", [token], None, at=1.0), Piece("b", [2] * 10, "hits", at=1 + 10 / speed)],
            counters=COUNTERS,
            taken=taken,
        )
        for speed in speeds
    ]


SSD = turns(8, 9.1, 11)


@pytest.mark.parametrize(
    "plain, ssd, said, gain",
    [
        (turns(5, 5.1, 5.2), SSD, "1.81 times as fast", True),
        (turns(5, 5), turns(6, 6), "1.20 times", True),
        (turns(5, 5.1, 5.2), turns(9, 9.1, 9.2, taken=0.3), "other programs took 30%", False),
        (turns(3, 5, 6), SSD, "3.0 to 6.0 tokens a second", False),
        (turns(5, 5), [*turns(9), *turns(9, token=7)],
         "a fault of ssd: after 0 tokens [1, 2, 2, 2] is not [7, 2, 2, 2]", None),
    ],
)  # fmt: skip
def test_the_verdict_is_a_gain_only_of_equal_texts_on_a_quiet_machine(plain, ssd, said, gain):
    assert said in verdict(plain, ssd)
    if gain is not None:
        shown = table(plain, ssd, Plan(4, 2, "float32", 1.5))
        cells = zip(shown.columns[0].cells, shown.rows)
        bold = [name for name, row in cells if row.style == "bold"]
        assert bold == (["ratio"] if gain else [])


def test_what_others_take_is_what_is_neither_idle_nor_the_demos():
    earlier, later = CoreTimes(0, 1, 0, 0), CoreTimes(10, 16, 1, 12)
    assert taken(earlier, later, cores=2) == (15 - 12 + 1) / 20
    assert taken(earlier, CoreTimes(10, 2, 0, 2), cores=2) == 0.0  # by a tick of the clock
