"""How many drafts are worth waiting for."""

import numpy as np
import pytest

from vllm_ssd.table import ANSWER, BRANCH, NOWHERE, SpeculationTable, TableShape
from vllm_ssd.target.steps import StepTimes
from vllm_ssd.target.yields import Depths, Yields

K = 6
STEPS = 1000


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "table", TableShape(slots=2, k=K, branches=2))


def verify(table, chances, rounds=1000):
    """So many rounds more of each source of drafts, of which each draft is accepted, if those
    before it are, with a chance given by source."""
    for source, chance in enumerate(chances):
        reached = rounds * chance ** np.arange(K + 1)
        offered, taken = reached[:-1].round(), reached[1:].round()
        table.target["offered"][0, source] += offered.astype(int)
        table.target["taken"][0, source] += taken.astype(int)


def work(table, ms, pieces=STEPS):
    """So much more work of the draft, each piece of which took so long: a glue, a token of
    branches, one of answers, if there were any."""
    for kind, each in zip(("glue", "branch", "answer"), ms):
        table.draft[kind] += pieces if each else 0
        table.draft[f"{kind}_us"] += int(pieces * each * 1000)


def measured(table, chances=(0.8, 0.8, 0.01), misses=0.2, ms=(2, 2, 2), parts=1):
    """What is known after as many steps and rounds as there are pieces of work. misses: a share.
    parts: glues a step."""
    table.target[:], table.draft[:] = 0, 0
    table.draft["in_flight"] = 2
    table.target["rounds"], table.target["misses"] = 1000, int(1000 * misses)
    work(table, ms)
    verify(table, chances)
    made = Yields(table)
    made.renew(STEPS // parts)
    return made


def best(made, batch=1, ms=20.0, most=K, hidden_ms=0.0, prompts_ms=0.0):
    return made.best(batch, most, StepTimes(ms / 1000, hidden_ms / 1000, prompts_ms / 1000))


def test_all_branches_and_answers_if_alone_until_measured(table):
    made = Yields(table)
    made.renew(STEPS)
    assert (best(made), best(made, 2)) == (Depths(6, 6), Depths(6, 0))
    made = measured(table, chances=(0.01, 0.01, 0.01))
    assert (made.best(1, 6, None), best(made)) == (Depths(6, 6), Depths(6, 0))


def test_what_costs_nothing_is_waited_for(table):
    """Glue and six tokens take 14 ms: they are there in time, or nearly."""
    assert best(measured(table, misses=0.0)).branch == 6
    assert best(measured(table, chances=(0.3, 0.0, 0.2), misses=0.0)).branch == 6


def test_answers_by_what_they_gain_and_cost(table):
    """A step of 20 ms yields 3.2 tokens, a missed one without answers 1. Alone it is a tenth longer
    for each draft of an answer, which is accepted with 0.8, 0.64, .. 0.26."""
    made = measured(table)
    assert 4 <= best(made).answer <= 6
    assert best(made, 16).answer == 0, "nearly every step has a row that misses"
    assert best(measured(table, misses=0.9), 4).answer >= 4, "most of its rows do"


@pytest.mark.parametrize(("ms", "chance"), [((2, 2, 14), 0.8), ((2, 2, 2), 0.1)])
def test_not_even_alone_where_answers_are_slow_or_useless(table, ms, chance):
    assert best(measured(table, (0.8, chance, 0.01), ms=ms)).answer == 0


def test_a_draft_at_work_is_longer_in_answering(table):
    made = measured(table, misses=0.3)
    assert best(made, 2, ms=20).answer > best(made, 2, ms=10).answer == 0


def test_branches_that_are_late_by_a_little(table):
    """Without a wait they would be late by more each step, until some are dropped."""
    assert best(measured(table, misses=0.0), ms=13.5).branch == 6


@pytest.mark.parametrize(
    ("chance", "depth"), [(0.98, 6), (0.7, 2), (0.02, 0)], ids=lambda each: str(each)
)
def test_branches_of_a_draft_that_is_too_slow(table, chance, depth):
    """Steps of 8 ms have room for glue and three tokens, two of which were begun for nothing; with
    two that are waited for it is four. All six take 14 ms."""
    found = best(measured(table, (chance, 0.0, 0.019), misses=0.0), ms=8.5).branch
    assert abs(found - depth) <= 1


def test_a_draft_that_is_never_in_time(table):
    """Glue and three tokens take four times as long as a step without a wait."""
    assert best(measured(table, (0.6, 0.6, 0.3)), ms=2) == Depths(0, 0)


def test_a_good_guess_is_not_worth_a_wait(table):
    """What a row verifies without the draft counts: its own continuation may be as good."""
    assert best(measured(table, (0.8, 0.8, 0.75)), ms=6) == Depths(0, 0)


def test_waits_that_are_hidden_cost_nothing(table):
    made = measured(table, misses=0.3)
    assert best(made, 4, ms=18).answer == 0
    assert best(made, 4, ms=18, hidden_ms=8).answer >= 2


def test_where_prompts_take_the_time_drafts_are_worth_more(table):
    made = measured(table, misses=0.3)
    assert best(made, 4, ms=16).answer == 0 < best(made, 4, ms=16, prompts_ms=40).answer


def test_half_an_answer_makes_the_next_branches_late(table):
    """The draft ends what it has begun beyond it, and glue and branches just fit into a step."""
    for misses in (0.1, 0.3, 0.6, 0.9):
        assert best(measured(table, (0.7, 0.7, 0.3), misses), ms=14).answer in (0, 4, 5, 6)


def test_drafting_in_parts_takes_longer(table):
    """Where half of a batch is drafted for at a time, 14 ms are 28."""
    chances = (0.6, 0.0, 0.01)
    assert best(measured(table, chances, misses=0.0), 4, ms=13.5).branch == 6
    assert best(measured(table, chances, misses=0.0, parts=2), 4, ms=13.5).branch < 6


def test_no_more_than_asked_for(table):
    assert best(measured(table), most=3) == Depths(3, 3)


def test_what_is_about_as_good_stays(table):
    """A draft more or less of an answer changes little."""
    made = measured(table)
    found = best(made)
    about = Depths(found.branch, found.answer - 1)
    for last, chosen in ((about, about), (Depths(0, 0), found), (None, found)):
        assert made.best(1, K, StepTimes(0.02), last) == chosen


def test_answers_never_seen_take_as_long_as_branches(table):
    assert best(measured(table, ms=(2, 2, 0))).answer >= 4


def test_texts_that_change_change_what_is_best(table):
    """Answers are of no use, and then they are."""
    made = measured(table, (0.8, 0.1, 0.01))
    assert best(made).answer == 0
    for repeat in range(8):
        verify(table, (0.9, 0.9, 0.01), rounds=40)
        made.renew(STEPS + repeat)
    assert best(made).answer >= 4


def test_a_draft_that_gets_faster_is_waited_for(table):
    made = measured(table, ms=(9, 9, 9))
    assert best(made, ms=10) == Depths(0, 0)
    work(table, (1, 1, 1), 3 * STEPS)
    made.renew(4 * STEPS)
    assert best(made, ms=10).branch == 6


def test_sources_are_known_by_their_place():
    assert (BRANCH, ANSWER, NOWHERE) == (0, 1, 2)
