"""What is waited for, by reason and by measurement."""

from collections import Counter

import pytest

from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.target.patience import Patience, WaitPolicy
from vllm_ssd.target.yields import Depths

K = 4
WAIT, SKIP, REASONED = Depths(K, K), Depths(0, 0), Depths(2, 1)


@pytest.fixture
def table(tmp_path):
    return SpeculationTable.create(tmp_path / "table", TableShape(slots=2, k=K, branches=2))


class Play:
    """Steps whose times and yields follow from what is decided. rates: tokens a second, by that."""

    def __init__(self, table, **rates):
        self.patience = Patience(WaitPolicy("auto", K, 1.0), table)
        self.patience._yields.best = lambda *_: REASONED
        self.accepted = table.target["accepted"][0]
        self.rates = dict(zip((WAIT, SKIP, REASONED), map(rates.get, ("wait", "skip", "reasoned"))))
        self.now = 100.0

    def run(self, steps, batch=1, pause=None):
        """How often what was decided. pause: seconds that every fifth step takes longer."""
        decisions = Counter()
        for step in range(steps):
            decided = self.patience.decide(batch, self.now)
            decisions[decided] += 1
            self.accepted[3] += batch
            self.now += 4 * batch / self.rates[decided]
            self.now += pause if pause and step % 5 == 0 else 0
        return decisions


@pytest.mark.parametrize("on_miss", ["wait", "skip"])
def test_others_do_as_they_are_told(table, on_miss):
    told = Patience(WaitPolicy(on_miss, K, 1.0), table)
    depths = WAIT if on_miss == "wait" else SKIP
    assert told.decide(1) == told.decide(9) == depths


def test_reason_where_measurements_do_not_speak_against_it(table):
    """What is about as good has a turn now and then, 20 steps in about 1300."""
    play = Play(table, wait=100, skip=101, reasoned=99)
    play.run(3000)
    decisions = play.run(6000)
    assert decisions[REASONED] > 0.95 * 6000
    assert 60 <= decisions[WAIT] <= 120 and 60 <= decisions[SKIP] <= 120


@pytest.mark.parametrize(
    ("wait", "skip", "best"), [(110, 100, WAIT), (100, 150, SKIP), (150, 140, WAIT)]
)
def test_what_is_measured_to_be_clearly_better(table, wait, skip, best):
    play = Play(table, wait=wait, skip=skip, reasoned=100)
    play.run(3000)
    assert play.run(6000)[best] > 0.95 * 6000


def test_what_is_hopeless_is_rarely_tried(table):
    play = Play(table, wait=10, skip=100, reasoned=100)
    play.run(3000)
    assert 0 < play.run(16000)[WAIT] <= 40


def test_what_was_worse_may_become_better(table):
    play = Play(table, wait=90, skip=80, reasoned=100)
    play.run(3000)
    play.rates[WAIT] = 200
    play.run(6000)
    assert play.run(1000)[WAIT] > 900


def test_every_size_of_batch_by_itself(table):
    play = Play(table, wait=100, skip=150, reasoned=100)
    play.run(3000)
    play.rates[SKIP] = 50
    play.run(3000, batch=8)
    assert play.run(1000, batch=8)[REASONED] > 900
    play.rates[SKIP] = 150
    assert play.run(1000)[SKIP] > 900


def test_sizes_that_alternate_are_no_stretch(table):
    """Nothing is measured then, and nothing goes wrong."""
    play = Play(table, wait=100, skip=1000, reasoned=100)
    decisions = sum((play.run(1, batch) for _ in range(100) for batch in (1, 4)), Counter())
    assert decisions[REASONED] >= 150


def test_pauses_are_nobodys_fault(table):
    """A prompt in every fifth step takes twenty times as long as deciding otherwise gains."""
    play = Play(table, wait=100, skip=130, reasoned=100)
    play.run(3000, pause=1.0)
    assert play.run(3000, pause=1.0)[SKIP] > 0.9 * 3000
