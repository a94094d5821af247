"""The guess for rows without drafts, in numpy and as a kernel."""

import random

import numpy as np
import pytest

from tests.support.guess import LONGEST, REACH, continuation

VOCAB = 100


def guess(text, k=4):
    return continuation(np.array(text, np.int32), k, VOCAB).tolist()


def test_no_further_back_than_it_reaches():
    assert guess([2, 8, *[9] * (REACH - 2), 2]) == [8, 9, 9, 9]
    assert guess([2, 8, *[9] * (REACH - 1), 2]) == [2] * 4


@pytest.mark.parametrize("placeholder", [VOCAB, 2**31 - 1, -1])
def test_ids_outside_the_vocabulary_are_not_proposed(placeholder):
    """They are compared, as they are a part of the text."""
    image = [placeholder] * 3
    assert guess([5, *image, 6, 7, 5], k=6) == [0, 0, 0, 6, 7, 5]
    assert guess([1, *image, 6, 2, *image]) == [6, 2, 0, 0]
    assert guess([VOCAB - 1, placeholder]) == [0] * 4, "no match"


def match(text, place):
    """How many tokens up to a place equal those at the end."""
    lengths = range(1, min(LONGEST, place + 1) + 1)
    return max((n for n in lengths if text[place + 1 - n : place + 1] == text[-n:]), default=0)


@pytest.mark.parametrize("seed", range(5))
def test_against_a_plain_search(seed):
    rng = random.Random(seed)
    for _ in range(50):
        text = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        end = len(text) - 1
        matched, best = max(((match(text, place), place) for place in range(end)), default=(0, 0))
        expected = (
            [text[best + 1 + i % (end - best)] for i in range(4)] if matched else text[-1:] * 4
        )
        assert guess(text) == expected
