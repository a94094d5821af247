"""What the soak counts and what it finds wrong, without servers."""

import random

import pytest

from benchmarks.soak.load import Outcome
from benchmarks.soak.requests import CHOICES, Choice, Question, Request, difference, malformed
from benchmarks.soak.requests import random_request as draw
from benchmarks.soak.summary import summarise
from benchmarks.soak.watch import Sample

PLAIN = Choice("one two, three", [1, 2, 3, 4], "length", [3.0, 0.5, 2.0, 1.0])


def asked(tokens: int = 4, cut: int | None = None, **body: object) -> Request:
    return Request(7, {"temperature": 0, "max_tokens": tokens, **body}, cut)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_a_beginning_of_the_text_is_right(tokens: list[int]) -> None:
    assert difference(asked(), Choice("", tokens), PLAIN) is None


def test_where_texts_part() -> None:
    found = difference(asked(), Choice("", [1, 9, 3]), PLAIN)
    assert found is not None and "question 7 parts after 1 tokens: [9, 3]" in found
    assert "margin was 0.5" in found
    unknown = difference(asked(), Choice("", [1, 9, 3]), Choice("", PLAIN.tokens))
    assert unknown is not None and "margin" not in unknown


GRAMMAR = {"temperature": 1, "structured_outputs": {"choice": CHOICES}}


@pytest.mark.parametrize(
    ("body", "choice", "right"),
    [
        ({}, Choice("", [5, 6, 7, 8], "length"), True),
        ({}, Choice("", [5, 6, 7], "length"), False),
        ({}, Choice("", [5, 6, 7, 8], "stop"), False),
        ({}, Choice("", [5, 6, 7, 8]), False),
        ({"stop": ","}, Choice("one two", [1, 2, 3], "stop"), True),
        ({"stop": ","}, Choice("one two,", [1, 2, 3], "stop"), False),
        (GRAMMAR, Choice("one two", [1, 2, 3], "stop"), False),
        (GRAMMAR, Choice(CHOICES[0], [1, 2, 3], "stop"), True),
        (GRAMMAR, Choice(CHOICES[0][:9], [1, 2, 3, 4], "length"), True),
        (GRAMMAR, Choice("one two", [1, 2, 3, 4], "length"), False),
        (GRAMMAR, Choice(CHOICES[0][:9], [1, 2, 3], "length"), False),
    ],
)
def test_answers_end_as_asked(body: dict[str, object], choice: Choice, right: bool) -> None:
    assert (malformed(asked(**body), choice) is None) is right


def test_requests_are_of_every_kind() -> None:
    questions = [Question([1], 10), Question([2], 20)]
    rng = random.Random(0)
    requests = [draw(rng, questions) for _ in range(500)]
    for name in ("top_p", "seed", "stop", "n", "logprobs"):
        assert 0 < sum(name in request.body for request in requests) < 250, name
    assert 0 < sum(request.cut is not None for request in requests) < 250
    structured = [request for request in requests if "structured_outputs" in request.body]
    assert 100 < len(structured) < 250
    assert not any(request.greedy or "ignore_eos" in request.body for request in structured)
    for request in requests:
        assert 1 <= request.body["max_tokens"] <= questions[request.question].tokens
        assert request.cut is None or request.cut < request.body["max_tokens"]
        assert not (request.greedy and "n" in request.body)


def sample(at: float, **figures: int) -> Sample:
    mib = {"target_mib": 100.0 + at, "draft_mib": 10.0, "ray_mib": 1.0, "gpu_mib": None}
    counted = {"rounds": 0, "hits": 0, "misses": 0, "late": 0} | figures
    return Sample(at=at, tokens=int(10 * at), open_files=5, shared_files=1, **mib, **counted)


def test_verdict() -> None:
    outcome = Outcome(compared=2, failures=["no token"], differences=["parts"])
    samples = [sample(0), sample(1)]
    summary = summarise(outcome, samples, "killed", [0.5], 1, False, ["a file"], True)
    assert len(summary.problems) == 4
    assert len(summarise(outcome, samples, "killed", [], 0, True, [], False).problems) == 1
    assert summarise(Outcome(), samples, "killed", [], 0, True, [], True).problems == [
        "no greedy text was compared"
    ]
