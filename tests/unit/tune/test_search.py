"""Which candidates are asked for, on scores whose best one is known."""

from __future__ import annotations

import pytest

from vllm_ssd.tune.records import Candidate
from vllm_ssd.tune.search import Enough, nearest, search

KS, FS = [1, 2, 3, 5, 7, 10], [0, 1, 3, 6]


class Hill:
    """The score falls with the distance from a draft's best k and f."""

    def __init__(self, tops: dict[str, tuple[int, int, float]], most: int = 100):
        self.tops = tops
        self.most = most
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> float:
        if candidate not in self.asked:
            if len(self.asked) == self.most:
                raise Enough
            self.asked.append(candidate)
        k, f, height = self.tops[candidate.draft]
        steps = abs(KS.index(candidate.k) - KS.index(k)) + abs(FS.index(candidate.f) - FS.index(f))
        return height * 0.97**steps

    def best(self) -> Candidate:
        return max(self.asked, key=self)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("f", FS)
def test_the_top_is_found(k, f):
    hill = Hill({"a": (k, f, 2.0)})
    search(["a"], KS, FS, hill)
    assert hill.best() == Candidate("a", k, f)
    assert len(hill.asked) < len(KS) * len(FS) / 2, "the grid need not be measured"


def test_a_draft_that_is_far_behind_is_measured_once():
    hill = Hill({"good": (3, 1, 2.0), "poor": (7, 3, 1.0)})
    search(["poor", "good"], KS, FS, hill)
    assert [each for each in hill.asked if each.draft == "poor"] == [Candidate("poor", 7, 3)]
    assert hill.best() == Candidate("good", 3, 1)


def test_a_draft_that_is_close_may_yet_win():
    """At the start it is behind, as its own best values are further away."""
    hill = Hill({"near": (7, 3, 2.0), "far": (3, 1, 2.1)})
    search(["near", "far"], KS, FS, hill)
    assert hill.best() == Candidate("far", 3, 1)


def test_chance_moves_nothing():
    """Differences of less than a hundredth: the start and its neighbours are enough."""
    asked = set()

    def flat(candidate: Candidate) -> float:
        asked.add(candidate)
        return 2.0 + (0.009 if candidate.k == 10 else 0)

    search(["a"], KS, FS, flat)
    assert asked == {Candidate("a", k, f) for k, f in [(7, 3), (10, 3), (5, 3), (7, 6), (7, 1)]}


def test_it_ends_when_it_is_to():
    hill = Hill({"a": (1, 0, 2.0)}, most=3)
    search(["a"], KS, FS, hill)
    assert len(hill.asked) == 3


def test_one_value_of_each():
    hill = Hill({"a": (3, 1, 2.0)})
    search(["a"], [2], [3], hill)
    assert hill.asked == [Candidate("a", 2, 3)]


def test_nearest():
    assert nearest(KS, 7) == 7 and nearest([2, 3], 7) == 3 and nearest([10, 16], 7) == 10
