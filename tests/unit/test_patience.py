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


def test_reason_knows_how_long_a_step_is_without_its_wait(table):
    """Now and then a step takes a prompt, or much longer."""
    patience = Patience(WaitPolicy("auto", K, 1.0), table)
    known = []
    patience._yields.best = lambda batch, most, verify_s: known.append(verify_s) or Depths(2, 1)
    now = 100.0
    for step in range(100):
        assert patience.decide(1, now) == Depths(2, 1)
        waited = 0.002 * (step % 3)
        table.target["wait_us"] += int(waited * 1e6)
        now += 0.02 + waited + (0.1 if step % 7 == 0 else 0.0)
    assert known[-1] == pytest.approx(0.02, rel=0.01)


def test_what_is_measured_to_be_better(table):
    patience = Patience(WaitPolicy("auto", K, 1.0), table)
    patience._yields.best = lambda *_: Depths(2, 1)
    now, decided = 100.0, []
    for _ in range(2000):
        decided.append(patience.decide(1, now))
        table.target["accepted"][0, 3] += 1
        now += 0.02 if decided[-1] == SKIP else 0.04
    assert decided.count(SKIP) > 1000
