"""The demo: what counts as decoding, how it speculates by what steps cost, and what it says."""

from examples.demo.__main__ import separate_cores
from examples.demo.busy import CoreTimes, taken
from examples.demo.engine import Piece
from examples.demo.plan import DRAFT_ROWS, KS, Costs, best_plan
from examples.demo.probe import matrices
from examples.demo.report import first_difference, ratio, same_text, too_noisy, verdict
from examples.demo.side import Turn

COUNTERS = {"rounds": 4, "hits": 2, "misses": 1, "late": 1, "wait_us": 8000, "accepted": [0, 4]}


def turn(*pieces: Piece) -> Turn:
    made = Turn()
    for piece in pieces:
        made.add(piece)
    return made


def turns(*speeds: float, taken: float = 0.0) -> list[Turn]:
    return [
        Turn([[1, 2]], tokens=10, seconds=10 / speed, counters=COUNTERS, taken=taken)
        for speed in speeds
    ]


def costs(target_ms: dict[int, float], draft_ms: float, bfloat16: float = 0.5) -> Costs:
    """Of a machine on which the draft's rows are free, and a step in bfloat16 has a given cost."""
    return Costs(
        plain=0.1,
        target={rows: target_ms.get(rows, target_ms[8]) / 1000 for rows in (1, *range(2, 9))},
        draft={
            "float32": dict.fromkeys(DRAFT_ROWS, draft_ms / 1000),
            "bfloat16": dict.fromkeys(DRAFT_ROWS, bfloat16 * draft_ms / 1000),
        },
    )


def plan():
    return best_plan(costs({1: 100, 8: 100}, draft_ms=10))


def test_only_what_follows_an_answers_first_piece_counts():
    made = turn(
        Piece(0, "a", [1], at=10.0),
        Piece(0, "b", [2, 3, 4], at=10.5),
        Piece(1, "c", [5], at=20.0),  # the pause before it is a prefill
        Piece(1, "d", [6], at=20.5),
    )
    assert made.answers == [[1, 2, 3, 4], [5, 6]]
    assert (made.tokens, made.seconds) == (4, 1.0)
    assert made.tokens_per_second == 4.0


def test_where_rows_are_free_and_the_draft_fast_most_tokens_are_drafted():
    chosen = best_plan(costs({1: 100, 8: 100}, draft_ms=2))
    assert (chosen.k, chosen.f) == (KS[-1], 2)
    assert chosen.round_cost == 1.0 and chosen.gain > 3


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


def test_ratio_is_of_the_middle_turns():
    assert ratio(turns(5, 1, 6), turns(9, 10, 100)) == 2.0


def test_a_quiet_machine_has_a_gain_and_a_busy_one_has_no_figure_to_trust():
    plain, ssd = turns(5, 5.1, 5.2), turns(9, 9.1, 9.2)
    assert too_noisy(plain, ssd) is None
    assert "1.78 times as fast" in verdict(plain, ssd, plan())
    busy = turns(9, 9.1, 9.2, taken=0.3)
    assert "other programs took 30%" in verdict(plain, busy, plan())
    spread = turns(3, 5, 6)
    assert "turns from 3.0 to 6.0" in verdict(spread, ssd, plan())


def test_a_small_gain_is_explained_with_what_was_measured():
    said = verdict(turns(5, 5), turns(6, 6), plan())
    assert "1.00 steps of plain vLLM" in said and "can gain 2.00 times" in said
    assert "1.20 is what 2 ms a round" in said


def test_equal_answers_do_not_part():
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None


def test_first_difference_names_the_answer_and_the_place():
    told = first_difference([[1], [1, 2, 3]], [[1], [1, 2, 4, 5]])
    assert told == "answer 2 parts after 2 tokens: [3] is not [4, 5]"


def test_an_answer_that_only_ends_sooner_is_a_difference():
    assert first_difference([[1, 2]], [[1]]) == "answer 1 parts after 1 tokens: [2] is not []"


def test_every_turn_must_have_the_text_of_the_first():
    assert same_text([Turn([[1, 2]]), Turn([[1, 2]])]) is None
    assert "[2] is not [3]" in (same_text([Turn([[1, 2]]), Turn([[1, 2]]), Turn([[1, 3]])]) or "")


def test_separate_cores_are_some_of_those_available():
    assert separate_cores([0]) == [0]
