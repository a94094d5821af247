"""When a batch waits for answers."""

import pytest

from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.target.patience import Patience, WaitPolicy


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "table", TableShape(slots=2, k=4, branches=2))


def measured(table, round_s, answer_step_us, accepted):
    """A patience that has seen rounds of that time, and as many of each accepted length."""
    patience = Patience(WaitPolicy("auto", 4, 1.0), table)
    now = 100.0
    for _ in range(20):
        patience.look(now)
        now += round_s
    table.target["accepted"] = accepted
    table.draft["answer"], table.draft["answer_us"] = 10, 10 * answer_step_us
    patience.look(now)
    return patience


@pytest.mark.parametrize("on_miss", ["wait", "skip"])
def test_others_do_as_they_are_told(table, on_miss):
    patience = Patience(WaitPolicy(on_miss, 4, 1.0), table)
    patience.look()
    assert patience.answers_in(1) == patience.answers_in(9) == (on_miss == "wait")


def test_alone_until_measured(table):
    patience = Patience(WaitPolicy("auto", 4, 1.0), table)
    assert patience.answers_in(1) and not patience.answers_in(2)


def test_by_what_is_gained_and_what_it_costs(table):
    """Rounds of 20 ms that yield 4 tokens, answers of 4 steps: alone there are 3 tokens to gain of
    1; of two, 3 of 5; of ten, 3 of 37."""
    patience = measured(table, 0.02, 2000, [0, 0, 0, 300, 0])
    assert patience.answers_in(1)  # 8 ms * 1 < 3 * 20 ms
    assert patience.answers_in(2)  # 8 ms * 5 < 3 * 20 ms
    assert not patience.answers_in(3)  # 8 ms * 9 > 3 * 20 ms
    assert patience.answers_in(10, missed=8)
    assert not patience.answers_in(10, missed=2)


@pytest.mark.parametrize(
    ("answer_step_us", "accepted"), [(16000, [0, 0, 0, 300, 0]), (2000, [300, 0, 0, 0, 1])]
)
def test_not_even_alone_where_answers_are_slow_or_useless(table, answer_step_us, accepted):
    assert not measured(table, 0.02, answer_step_us, accepted).answers_in(1)


def test_waiting_is_not_part_of_a_round(table):
    patience = Patience(WaitPolicy("auto", 4, 1.0), table)
    for number in range(20):
        table.target["wait_us"] = number * 90_000
        patience.look(100 + number * 0.1)
    table.target["accepted"] = [0, 0, 0, 300, 0]
    table.draft["answer"], table.draft["answer_us"] = 1, 9_000
    patience.look(102.0)
    assert not patience.answers_in(1)  # 36 ms against 3 * 10 ms
