"""When a batch waits for answers."""

import pytest

from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.target.patience import Patience, WaitPolicy


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "table", TableShape(slots=2, k=4, branches=2))


def patience(table):
    return Patience(WaitPolicy("auto", 3, 1.0), table)


def verify(table, *tokens):
    """A hundred more rounds of each source of drafts, with so many tokens each."""
    table.target["rounds_by"] += 100
    table.target["tokens_by"] += [round(100 * each) for each in tokens]


def measured(table, tokens, round_s=0.02, answer_step_us=2000):
    """A patience that has seen rounds of that time and those tokens, by the source of drafts."""
    made = patience(table)
    now = 100.0
    for _ in range(20):
        made.look(now)
        now += round_s
    verify(table, *tokens)
    table.draft["answer"], table.draft["answer_us"] = 10, 10 * answer_step_us
    made.look(now)
    return made


@pytest.mark.parametrize("on_miss", ["wait", "skip"])
def test_others_do_as_they_are_told(table, on_miss):
    told = Patience(WaitPolicy(on_miss, 4, 1.0), table)
    told.look()
    assert told.answers_in(1) == told.answers_in(9) == (on_miss == "wait")


def test_alone_until_measured(table):
    made = patience(table)
    table.target["rounds_by"] = 4  # enough of each for a trial
    made.look(100.0)
    assert made.answers_in(1) and not made.answers_in(2)


def test_by_what_is_gained_and_what_it_costs(table):
    """Rounds of 20 ms, answers of 3 steps and one before them. Alone there are 3 tokens to gain of
    1; of two, 3 of 5; of ten, 3 of 37."""
    made = measured(table, (4, 4, 1))
    assert made.answers_in(1)  # 8 ms * 1 < 3 * 20 ms
    assert made.answers_in(2)  # 8 ms * 5 < 3 * 20 ms
    assert not made.answers_in(3)  # 8 ms * 9 > 3 * 20 ms
    assert made.answers_in(10, missed=8)
    assert not made.answers_in(10, missed=2)


@pytest.mark.parametrize(("step_us", "tokens"), [(16000, (4, 4, 1)), (2000, (4, 1.2, 1))])
def test_not_even_alone_where_answers_are_slow_or_useless(table, step_us, tokens):
    assert not measured(table, tokens, answer_step_us=step_us).answers_in(1)


def test_a_good_guess_is_not_worth_an_answer(table):
    """What a row verifies without the draft counts: its own continuation may be as good."""
    assert not measured(table, (4, 3, 2.8)).answers_in(1)


def test_waiting_is_not_part_of_a_round(table):
    made = patience(table)
    for number in range(20):
        table.target["wait_us"] = number * 90_000
        made.look(100 + number * 0.1)
    verify(table, 4, 4, 1)
    table.draft["answer"], table.draft["answer_us"] = 1, 9_000
    made.look(102.0)
    assert not made.answers_in(1)  # 36 ms against 3 * 10 ms


def test_what_is_not_done_is_tried_now_and_then(table):
    made = measured(table, (4, 1, 1))
    assert not made.answers_in(1)
    for _ in range(256):
        made.look(0.0)
    decisions = []
    for _ in range(20):
        decisions.append(made.answers_in(1))
        table.target["rounds_by"][0, 1] += decisions[-1]
        table.target["tokens_by"][0, 1] += 4 * decisions[-1]
        made.look(0.0)
    assert decisions == [True] * 4 + [False] * 16


def test_texts_that_change_change_the_decision(table):
    """Answers are of no use, and then they are."""
    made = measured(table, (4, 1, 1))
    assert not made.answers_in(1)
    for number in range(20):
        verify(table, 4, 4, 1)
        made.look(100.4 + 0.02 * number)
    assert made.answers_in(1)
