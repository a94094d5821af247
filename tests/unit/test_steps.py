"""How long steps take."""

import random

import pytest

from vllm_ssd.target.steps import Steps


def play(steps, count, ms=20.0, wait_ms=0.0, waits=0.0, hidden_ms=0.0, lag=2, prompt_ms=0.0):
    """So many steps, of which a share waits, and every fifth has a prompt. The counters lag."""
    chance = random.Random(0)
    unseen = [0.0] * lag
    counted = []
    for step in range(count):
        waited = wait_ms if chance.random() < waits else 0.0
        unseen.append(waited)
        took = ms + max(0.0, waited - hidden_ms) + (prompt_ms if step % 5 == 4 else 0.0)
        counted.append([1000 * each for each in steps.add(took / 1000, unseen.pop(0) / 1000)])
    return counted


def ms(times):
    return [1000 * each for each in times]


def test_nothing_is_known_at_first():
    assert Steps().times() is None


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_without_waits(lag):
    """Seldom enough that some steps are far from any."""
    steps = Steps()
    play(steps, 400, waits=0.1, wait_ms=9, lag=lag)
    assert ms(steps.times()) == pytest.approx([20, 0, 0], abs=0.5)


@pytest.mark.parametrize("waits", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("hidden", [0.0, 3.0])
def test_what_of_waits_is_hidden(waits, hidden):
    """How long steps without a wait are was seen before, and is remembered."""
    steps = Steps()
    play(steps, 100)
    play(steps, 400, waits=waits, wait_ms=9, hidden_ms=hidden)
    assert ms(steps.times()) == pytest.approx([20, hidden, 0], abs=0.5)
    play(steps, 100)
    assert ms(steps.times()) == pytest.approx([20, hidden, 0], abs=0.5), "still known"


def test_waits_without_any_step_that_does_not():
    """As if nothing was hidden."""
    steps = Steps()
    play(steps, 100, waits=1.0, wait_ms=9, hidden_ms=3)
    assert ms(steps.times()) == pytest.approx([17, 0, 0], abs=0.5)


@pytest.mark.parametrize("wait", [0.0, 25.0])
def test_prompts_are_told_apart(wait):
    """Steps that wait are no prompts, although they may take as long."""
    steps = Steps()
    play(steps, 100, prompt_ms=100)
    counted = play(steps, 400, waits=0.5, wait_ms=wait, prompt_ms=100)
    assert ms(steps.times()) == pytest.approx([20, 0, 20], abs=2)
    usual, prompts = (sum(each) / 400 for each in zip(*counted))
    assert usual == pytest.approx(20 + wait / 2, rel=0.1)
    assert prompts == pytest.approx(20, rel=0.1)
    assert sum(prompt > 0 for _, prompt in counted) == pytest.approx(80, abs=8)


@pytest.mark.parametrize("before", [6, 7, 200])
def test_a_pause_is_no_prompt(before):
    """Nor is the first step of which anything is said."""
    steps = Steps()
    play(steps, before)
    steps.add(60.0, 0.0)
    play(steps, 10)
    assert ms(steps.times()) == pytest.approx([20, 0, 0], abs=4 if before == 200 else 40)


def test_a_long_wait_makes_prompts_no_shorter():
    steps = Steps()
    play(steps, 200)
    play(steps, 100, waits=0.05, wait_ms=400)
    assert steps.times().prompts == 0


def test_steps_that_become_longer():
    steps = Steps()
    play(steps, 100)
    play(steps, 100, ms=70)
    assert ms(steps.times())[0] == pytest.approx(70)


def test_others_came_between():
    """What the counters say then is of the others."""
    steps = Steps()
    play(steps, 100)
    steps.interrupted()
    steps.add(0.02, 0.5)
    assert ms(steps.times()) == pytest.approx([20, 0, 0], abs=0.5)
