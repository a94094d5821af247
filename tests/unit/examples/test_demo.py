"""The demo: what counts as decoding, how it speculates by what steps cost, and what it says."""

import pytest
from rich.console import Console
from rich.table import Table

from examples.demo.__main__ import separate_cores
from examples.demo.busy import CoreTimes, taken
from examples.demo.engine import Piece
from examples.demo.plan import DRAFT_ROWS, KS, Costs, Plan, best_plan
from examples.demo.probe import matrices
from examples.demo.report import (
    first_difference,
    ratio,
    same_text,
    table,
    tokens_a_round,
    too_noisy,
    verdict,
)
from examples.demo.screen import Pane
from examples.demo.side import Turn

COUNTERS = {
    "rounds": 4,
    "hits": 2,
    "misses": 1,
    "late": 1,
    "wait_us": 8000,
    "accepted": [0, 4],
    "ready": [1, 1],
}


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


def costs(target_ms: dict[int, float], draft_ms: float, bfloat16: float = 0.5) -> Costs:
    """Of a machine on which the draft's rows are free, and a step in bfloat16 has a given cost."""
    return Costs(
        plain=0.1,
        target={rows: target_ms.get(rows, target_ms[8]) / 1000 for rows in range(1, 9)},
        draft={
            "float32": dict.fromkeys(DRAFT_ROWS, draft_ms / 1000),
            "bfloat16": dict.fromkeys(DRAFT_ROWS, bfloat16 * draft_ms / 1000),
        },
    )


def test_only_what_follows_an_answers_first_piece_counts():
    pieces = [("a", [1], 10.0), ("b", [2, 3, 4], 10.5), ("c", [5], 11.0)]
    made = Turn([Piece(text, tokens, None, at) for text, tokens, at in pieces])
    assert made.token_ids == [1, 2, 3, 4, 5]
    assert (made.tokens, made.seconds) == (4, 1.0)


def test_an_answer_is_shown_again_at_its_own_speed():
    pane = Pane("plain", [Piece("one", [1], None, 101.0), Piece(" two", [2], "hits", 105.0)])
    pane.asked, pane.shown_from = 100.0, 200.0

    def shown(now):
        console = Console(width=40, force_terminal=True, legacy_windows=False)
        with console.capture() as captured:
            console.print(pane.until(now))
        return captured.get()

    assert "one" in shown(202.0) and "two" not in shown(202.0)
    assert "two" in shown(206.0) and "2 tokens, 5.0 s" in shown(206.0)
    assert "\x1b[32m two" in shown(206.0), "a hit is green"


def test_where_rows_are_free_and_the_draft_fast_most_tokens_are_drafted():
    chosen = best_plan(costs({1: 100, 8: 100}, draft_ms=2))
    assert (chosen.k, chosen.f) == (KS[-1], 2)
    assert chosen.gain > 3


def test_where_rows_cost_fewer_are_verified():
    dear = {rows: 100.0 * rows for rows in range(1, 9)}
    chosen = best_plan(costs(dear, draft_ms=2))
    assert chosen.k == KS[0] and chosen.gain < 1


def test_a_slow_draft_drafts_fewer_tokens_in_the_data_type_that_is_faster():
    assert best_plan(costs({1: 100, 8: 100}, draft_ms=40)).draft_dtype == "bfloat16"
    slow = best_plan(costs({1: 100, 8: 100}, draft_ms=40, bfloat16=3.0))
    assert slow.draft_dtype == "float32" and slow.k < KS[-1]


def test_matrices_are_all_weights_of_a_layer():
    config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 50, "num_hidden_layers": 3}
    layer, head, layers = matrices(config)
    assert (head, layers) == ((50, 8), 3)
    # q, k, v, o, gate, up, down
    assert sum(n * k for n, k in layer) == 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 12


def test_what_others_take_is_what_is_neither_idle_nor_the_demos():
    earlier, later = CoreTimes(0, 1, 0, 0), CoreTimes(10, 16, 1, 12)
    assert taken(earlier, later, cores=2) == (15 - 12 + 1) / 20
    assert taken(earlier, CoreTimes(10, 2, 0, 2), cores=2) == 0.0  # by a tick of the clock


def test_ratio_is_of_all_tokens_and_all_seconds():
    assert ratio(turns(5, 5), turns(5, 15)) == 1.5


def test_a_quiet_machine_has_a_gain_and_a_busy_one_has_no_figure_to_trust():
    plain, ssd = turns(5, 5.1, 5.2), turns(8, 9.1, 11)
    assert too_noisy(plain, ssd) is None
    assert "1.81 times as fast" in verdict(plain, ssd)
    busy = turns(9, 9.1, 9.2, taken=0.3)
    assert "other programs took 30%" in verdict(plain, busy)
    spread = turns(3, 5, 6)
    assert "3.0 to 6.0 tokens a second" in verdict(spread, ssd)
    plan = Plan(4, 2, "float32", 1.5)
    assert bold_rows(table(plain, ssd, plan)) == ["ratio"]
    assert bold_rows(table(plain, busy, plan)) == []


def bold_rows(shown: Table) -> list[str]:
    return [name for name, row in zip(shown.columns[0].cells, shown.rows) if row.style == "bold"]


def test_a_small_gain_is_explained_with_what_was_measured():
    tokens = [1, *[2] * 10]
    plain = [Turn([Piece("a", [token], None, at=n / 5) for n, token in enumerate(tokens)])]
    ssd = turns(6)  # all ten tokens in one step
    assert tokens_a_round(plain) == 1 and tokens_a_round(ssd) == 10
    said = verdict(plain, ssd)
    assert "1.20 times" in said and "a round brings 10.0 tokens" in said
    assert "as long as 8.3 steps of plain vLLM" in said


def test_other_texts_are_a_fault():
    said = verdict(turns(5, 5), turns(9, 9, token=7))
    assert "a fault of ssd: after 0 tokens [1, 2, 2, 2] is not [7, 2, 2, 2]" in said


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 2, 4, 5], "after 2 tokens [3] is not [4, 5]"),
        ([1, 2], [1], "after 1 tokens [2] is not []"),
    ],
)
def test_first_difference_names_the_place(one, other, said):
    assert first_difference(one, other) == said


def test_every_answer_must_be_the_same():
    assert same_text(turns(5, 5), turns(9, 9)) is None
    assert same_text(turns(5, 5), [*turns(9), *turns(9, token=3)]) is not None


def test_separate_cores_are_some_of_those_available():
    assert separate_cores([0]) == [0]
