"""Ways to wait, chosen by what they are measured to yield."""

import random
from collections import Counter

import pytest

from vllm_ssd.target.steps import Took
from vllm_ssd.target.ways import Ways


class Play:
    """Steps whose times follow from the way that is chosen: 4 tokens a request, at so many tokens
    a second without prompts."""

    def __init__(self, **rates):
        self.rates, self.by_size, self.size = rates, {}, None
        self.took, self.tokens = Took(0.0), 0
        self.prompt_s = dict.fromkeys(rates, 0.0)  # what a prompt takes, every few hundred tokens
        self.noise = 0.0  # of a step's duration, a part of it
        self.chance = random.Random(0)

    def run(self, steps, size=0):
        """How often each way was chosen, with 2**size requests."""
        chosen = Counter()
        ways = self.by_size.setdefault(size, Ways(size, lambda: self.tokens))
        for _ in range(steps):
            if size == self.size:
                way = ways.next(1 << size, self.took)
            else:
                ways.interrupted()
                self.size, way = size, ways.way
            chosen[way] += 1
            self.tokens += 4 << size
            prompt_s = self.prompt_s[way] if self.chance.random() < (4 << size) / 400 else 0.0
            usual_s = (4 << size) / self.rates[way] * (1 + self.chance.gauss(0, self.noise))
            self.took = Took(max(usual_s, 0.0), prompt_s)
        return chosen


def test_reason_where_measurements_do_not_speak_against_it():
    """What is about as good has a turn now and then, 70 steps in about 4600."""
    play = Play(wait=99, skip=102, reasoned=100)
    play.run(8000)
    chosen = play.run(45000)
    assert chosen["reasoned"] > 0.95 * 45000
    assert 500 < chosen["wait"] < 1000 and 500 < chosen["skip"] < 1000


def test_turns_begin_soon_and_become_rare():
    play = Play(wait=100, skip=100, reasoned=100)
    others = [1000 - play.run(1000)["reasoned"] for _ in range(12)]
    assert others[0] and sum(others[:6]) > 2 * sum(others[6:])


@pytest.mark.parametrize(
    ("wait", "skip", "best"), [(120, 100, "wait"), (100, 150, "skip"), (150, 140, "wait")]
)
def test_what_is_measured_to_be_clearly_better(wait, skip, best):
    play = Play(wait=wait, skip=skip, reasoned=100)
    play.run(3000)
    assert play.run(9000)[best] > 0.95 * 9000


def test_what_is_about_as_good_stays():
    play = Play(wait=100, skip=120, reasoned=100)
    play.run(3000)
    play.rates["reasoned"] = play.rates["wait"] = 123
    assert play.run(12000)["skip"] > 0.9 * 12000


def test_what_is_hopeless_is_rarely_tried_and_not_for_long():
    play = Play(wait=10, skip=100, reasoned=100)
    assert 0 < play.run(3000)["wait"] <= 22
    assert 0 < play.run(60000)["wait"] <= 44


def test_what_was_worse_may_become_better():
    play = Play(wait=90, skip=85, reasoned=100)
    play.run(3000)
    play.rates["wait"] = 200
    play.run(12000)
    assert play.run(3000)["wait"] > 0.9 * 3000


def test_what_changes_is_found_out_anew():
    """Both become better, and the one that was not done all the more: its next turn, long after,
    is not waited for."""
    play = Play(wait=140, skip=100, reasoned=100)
    assert play.run(30000, size=4)["wait"] > 0.95 * 30000
    play.rates |= {"wait": 175, "skip": 200}
    play.run(150, size=4)
    assert play.run(500, size=4)["skip"] > 400


def test_what_differs_by_chance_is_no_change():
    """Stretches of few steps differ by a tenth."""
    play = Play(wait=140, skip=100, reasoned=100)
    play.noise = 0.4
    play.run(3000, size=4)
    assert play.run(20000, size=4)["wait"] > 0.9 * 20000


def test_what_hardly_changes_is_left():
    play = Play(wait=140, skip=100, reasoned=100)
    play.run(30000)
    play.rates["wait"] = 150
    assert play.run(4000)["wait"] == 4000


def test_every_size_of_batch_by_itself():
    play = Play(wait=100, skip=150, reasoned=100)
    play.run(3000)
    play.rates["skip"] = 50
    play.run(3000, size=3)
    assert play.run(1000, size=3)["reasoned"] > 900
    play.rates["skip"] = 150
    assert play.run(1000)["skip"] > 900


def test_large_batches_say_enough_in_a_few_steps():
    play = Play(wait=100, skip=150, reasoned=100)
    assert play.run(200, size=4)["skip"] > 50


def test_sizes_that_alternate_are_no_stretch():
    """Nothing is measured then, and no turn is used up by beginning it again and again."""
    play = Play(wait=100, skip=1000, reasoned=100)
    chosen = sum((play.run(1, size) for _ in range(1000) for size in (0, 2)), Counter())
    assert chosen["reasoned"] == 2000


def test_an_interrupted_stretch_begins_again():
    play = Play(wait=100, skip=150, reasoned=100)
    play.run(5000)
    assert play.run(20, size=4)["reasoned"] == 20
    assert play.run(60)["skip"] == 60


def test_what_prompts_take_counts_and_not_how_many_come():
    """One a few hundred tokens takes as long as those."""
    play = Play(wait=100, skip=107, reasoned=90)
    play.prompt_s |= dict.fromkeys(play.rates, 4.0)
    play.run(6000)
    assert play.run(6000)["skip"] > 0.9 * 6000


def test_a_wait_that_prompts_hide():
    play = Play(wait=90, skip=100, reasoned=90)
    play.prompt_s |= {"wait": 2.0, "skip": 4.0, "reasoned": 4.0}
    play.run(12000)
    assert play.run(6000)["wait"] > 0.9 * 6000
