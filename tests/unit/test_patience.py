"""What is waited for."""

import pytest

from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.target.patience import Patience, WaitPolicy
from vllm_ssd.target.yields import Depths

K = 4
WAIT, SKIP = Depths(K, K), Depths(0, 0)


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "table", TableShape(slots=2, k=K, branches=2))


@pytest.mark.parametrize(("on_miss", "depths"), [("wait", WAIT), ("skip", SKIP)])
def test_others_do_as_they_are_told(table, on_miss, depths):
    told = Patience(WaitPolicy(on_miss, K, 1.0), table)
    assert told.decide(1) == told.decide(9) == depths


def test_reason_knows_how_long_steps_are_without_waits_and_prompts(table):
    """Waits of 4 ms, of which 1 is hidden, every other step; now and then one takes a prompt."""
    patience = Patience(WaitPolicy("auto", K, 1.0), table)
    known = []
    patience._yields.best = lambda batch, most, step, last: known.append(step) or Depths(2, 1)
    now = 100.0
    for step in range(800):
        one_prefills = step % 2
        chosen = patience.decide(8 - one_prefills, now)
        waits = chosen == Depths(2, 1) and not one_prefills and step > 100
        table.target["wait_us"] += 4000 * waits
        now += 0.02 + 0.003 * waits + (0.1 if step % 7 == 0 else 0.0)
    assert known[-1].alone == pytest.approx(0.02, rel=0.01)
    assert known[-1].hidden == pytest.approx(0.001, rel=0.2)
    assert known[-1].prompts == pytest.approx(0.1 / 7, rel=0.3)


def test_what_is_measured_to_be_better(table):
    patience = Patience(WaitPolicy("auto", K, 1.0), table)
    patience._yields.best = lambda *_: Depths(2, 1)
    now, decided = 100.0, []
    for _ in range(2000):
        decided.append(patience.decide(1, now))
        table.target["accepted"][0, 3] += 1
        now += 0.02 if decided[-1] == SKIP else 0.04
    assert decided.count(SKIP) > 1000


def test_other_sizes_of_batch_have_other_steps(table):
    patience = Patience(WaitPolicy("auto", K, 1.0), table)
    known = {}
    patience._yields.best = lambda batch, _, step, last: known.update({batch: step}) or Depths(0, 0)
    now = 100.0
    for batch, took in ((1, 0.02), (16, 0.03), (2, 0.025), (1, 0.02)):
        for _ in range(40):
            patience.decide(batch, now)
            now += took
    alone = {batch: step.alone for batch, step in known.items()}
    assert alone == pytest.approx({1: 0.02, 16: 0.03, 2: 0.025}, rel=0.01)
