"""Which candidates are measured, and what is made of their figures."""

import json
import shlex

import pytest

from vllm_ssd.tools.tune.candidates import PLAIN, Candidate, report, search

KS, FS = [1, 2, 3, 5, 7, 10], [0, 1, 3, 6]
FAST, SLOW, FAILED = (Candidate("draft", k, 3) for k in (7, 2, 10))


def figures(*rates: float) -> dict[int, dict[str, float]]:
    """With these tokens per second, at 1 and at 8 clients."""
    others = {"mean_tpot_ms": 20.0, "spec_decode_acceptance_length": 2.5}
    return {n: {**others, "output_throughput": rate} for n, rate in zip((1, 8), rates)}


MEASURED = {PLAIN: figures(50, 400), SLOW: figures(60, 300), FAST: figures(200, 400)}


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("f", FS)
def test_the_best_of_two_drafts_is_found(k, f):
    """Where the score falls with the distance from a draft's best k and f."""
    tops, asked = {"a": (k, f, 2.0), "b": (7, 3, 1.0)}, []

    def height(candidate: Candidate) -> float:
        k, f, top = tops[candidate.draft]
        steps = abs(KS.index(candidate.k) - KS.index(k)) + abs(FS.index(candidate.f) - FS.index(f))
        return top * 0.97**steps

    def score(candidate: Candidate) -> float:
        asked.append(candidate)
        return height(candidate)

    search(["b", "a"], KS, FS, score)
    assert max(asked, key=height) == Candidate("a", k, f)
    assert len(set(asked)) == 2 + len(KS) - 1 + len(FS) - 1


def test_the_best_is_first_and_its_options_are_last():
    said = report({**MEASURED, FAILED: {}}, {"on_miss": "wait"})
    head, *rows, _, answer = said.splitlines()
    assert {len(row) for row in rows} == {len(head)}
    names = ["draft k=7 f=3"] * 2 + ["plain vLLM"] * 2 + ["draft k=2 f=3"] * 2
    assert [row[:13].strip() for row in rows] == names
    assert rows[0][13:].split() == ["1", "200.0", "4.00", "2.50", "20.0"]
    assert answer.startswith("Use this, 2.00 times plain vLLM: --speculative-config ")
    chosen = {"on_miss": "wait", "method": "ssd", "model": "draft", "k": 7, "f": 3}
    assert json.loads(shlex.split(answer)[-1]) == chosen


@pytest.mark.parametrize(
    "others, why",
    [
        ({SLOW: MEASURED[SLOW]}, "draft k=2 f=3, the best, is 0.95 times plain vLLM"),
        ({FAILED: {}}, "no candidate could be measured"),
    ],
)
def test_the_answer_may_be_no(others, why):
    """By a geometric mean over the loads."""
    said = report({PLAIN: MEASURED[PLAIN], **others}, {}).splitlines()[-1]
    assert said.startswith(f"Leave ssd off: {why}")
