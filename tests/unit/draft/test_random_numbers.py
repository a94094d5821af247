"""The random numbers of drafts: the same for the same seed and place, and otherwise random."""

import numpy as np
import pytest

from vllm_ssd.draft.sampling import uniforms


@pytest.mark.parametrize("k", [1, 4, 5, 7, 64])
def test_a_branch_has_the_same_numbers_whichever_are_beside_it(k):
    places = [900, 903, 900, 901, 908]
    _, together = uniforms([1, 2**64 - 1], [[5, 5, 5, 6, 7], places], k)
    assert together.shape == (5, k)
    for place, numbers in zip(places, together):
        assert np.array_equal(uniforms([2**64 - 1], [[place]], k)[0, 0], numbers)


def test_no_two_seeds_or_places_or_drafts_have_the_same():
    numbers = uniforms([0, 1, 2, 2**63], [range(1, 41)] * 4, 7)
    assert len(np.unique(numbers)) > 0.999 * numbers.size


@pytest.mark.parametrize("of", [(range(1, 4001), range(5)), (range(7, 8), range(20000))])
def test_they_are_uniform_and_say_nothing_about_each_other(of):
    """Over places, and over seeds as users give them."""
    places, seeds = of
    numbers = np.concatenate(uniforms(seeds, [places] * len(seeds), 4))
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = np.histogram(numbers, 50, (0, 1))[0]
    expected = numbers.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 6 * np.sqrt(2 * 49)
    pairs = [numbers[:-1, 0], numbers[1:, 0]], numbers[:, :2].T, numbers[:, [0, 3]].T
    for pair in pairs:
        assert abs(np.corrcoef(*pair)[0, 1]) < 6 / np.sqrt(len(pair[0]))
