"""How many drafts are worth waiting for."""

import numpy as np
import pytest

from vllm_ssd.table import ANSWER, BRANCH, NOWHERE, SpeculationTable, TableShape
from vllm_ssd.target.yields import Depths, Yields

K, MOST = 4, 3


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


def measured(table, chances, *, misses=0.2, late=0.0, tokens=3, step_us=2000):
    """What is known after rounds of so many tokens, with drafts that were accepted with these
    chances by their source, and a draft whose steps took so long. misses, late: shares of the
    rounds."""
    made = Yields(table)
    table.target["rounds"], table.target["misses"] = 1000, int(1000 * misses)
    table.target["late"] = int(1000 * late)
    table.target["accepted"][0, tokens - 1] = 1000
    for kind in ("branch", "answer"):
        table.draft[kind], table.draft[f"{kind}_us"] = 100, 100 * step_us
    verify(table, chances)
    made.renew()
    return made


def best(made, batch=1, step_s=0.02):
    return made.best(batch, MOST, step_s)


def test_all_branches_and_answers_if_alone_until_measured(table):
    made = Yields(table)
    made.renew()
    assert (best(made), best(made, 2)) == (Depths(3, 3), Depths(3, 0))


def test_by_what_is_gained_and_what_it_costs(table):
    """Rounds of 20 ms and 3 tokens, steps of 2 ms: alone, one costs 0.3 tokens. Drafts yield 0.8,
    0.64 and 0.51, less 0.01 for a guess."""
    made = measured(table, (0.8, 0.8, 0.01))
    assert best(made) == Depths(3, 3)
    assert best(made, 2) == Depths(3, 2)  # 1.11 miss if one does: the third yields 0.57 < 0.6
    assert best(made, 16) == Depths(3, 0), "branches are late for all who have one"


def test_a_draft_at_work_is_longer_in_answering(table):
    """By one and a half steps: 0.9 tokens of two."""
    made = measured(table, (0.8, 0.8, 0.01), late=0.8)
    assert (best(made), best(made, 2)) == (Depths(3, 3), Depths(3, 0))


@pytest.mark.parametrize(
    ("chance", "depth"), [(0.9, 3), (0.6, 2), (0.4, 1), (0.2, 0)], ids=lambda each: str(each)
)
def test_as_many_drafts_as_pay(table, chance, depth):
    """Each costs 0.3 tokens, alone."""
    assert best(measured(table, (chance, 0.0, 0.0), misses=0.0)) == Depths(depth, 0)


def test_more_where_many_of_a_batch_miss(table):
    assert best(measured(table, (0.8, 0.8, 0.01), misses=0.9), 4).answer == 3


@pytest.mark.parametrize(("step_us", "chance"), [(9000, 0.8), (2000, 0.1)])
def test_not_even_alone_where_answers_are_slow_or_useless(table, step_us, chance):
    assert best(measured(table, (0.8, chance, 0.01), step_us=step_us)).answer == 0


def test_a_good_guess_is_not_worth_a_wait(table):
    """What a row verifies without the draft counts: its own continuation may be as good. That is
    so of branches as long as none of their drafts is there, which is all that can be late."""
    assert best(measured(table, (0.8, 0.8, 0.75))) == Depths(0, 0)


def test_the_longer_a_round_the_less_matters_a_step_of_the_draft(table):
    made = measured(table, (0.5, 0.0, 0.0), misses=0.0)
    assert [best(made, step_s=step_s).branch for step_s in (0.01, 0.2)] == [0, 3]


def test_texts_that_change_change_what_is_best(table):
    """Drafts are of no use, and then they are."""
    made = measured(table, (0.1, 0.1, 0.01))
    assert best(made) == Depths(0, 0)
    for _ in range(8):
        verify(table, (0.9, 0.9, 0.01), rounds=40)
        made.renew()
    assert best(made) == Depths(3, 3)


def test_a_draft_that_gets_faster_is_waited_for(table):
    made = measured(table, (0.8, 0.0, 0.01), step_us=9000)
    assert best(made).branch == 0
    for kind in ("branch", "answer"):
        table.draft[kind] += 300
        table.draft[f"{kind}_us"] += 300 * 1000
    made.renew()
    assert best(made).branch == 3


def test_sources_are_known_by_their_place():
    assert (BRANCH, ANSWER, NOWHERE) == (0, 1, 2)
