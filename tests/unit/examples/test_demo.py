"""The demo's figures: what counts as decoding, and where two answers part."""

from examples.demo import Result, first_difference, separate_cores, summary
from examples.demo_engine import Piece


def result(*pieces: Piece) -> Result:
    made = Result()
    for piece in pieces:
        made.add(piece)
    return made


def test_only_what_follows_an_answers_first_piece_counts():
    made = result(
        Piece(0, "a", [1], at=10.0),
        Piece(0, "b", [2, 3, 4], at=10.5),
        Piece(1, "c", [5], at=20.0),  # the pause before it is a prefill
        Piece(1, "d", [6], at=20.5),
    )
    assert made.answers == [[1, 2, 3, 4], [5, 6]]
    assert (made.tokens, made.seconds) == (4, 1.0)
    assert made.tokens_per_second == 4.0


def test_equal_answers_do_not_part():
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None


def test_first_difference_names_the_answer_and_the_place():
    told = first_difference([[1], [1, 2, 3]], [[1], [1, 2, 4, 5]])
    assert told == "answer 2 parts after 2 tokens: [3] is not [4, 5]"


def test_an_answer_that_only_ends_sooner_is_a_difference():
    assert first_difference([[1, 2]], [[1]]) == "answer 1 parts after 1 tokens: [2] is not []"


def test_summary_says_ratio_rates_and_verdict():
    plain = Result([[1, 2, 3]], tokens=2, seconds=1.0)
    counters = {"rounds": 4, "hits": 2, "misses": 1, "late": 1, "wait_us": 0, "accepted": [0, 4]}
    ssd = Result([[1, 2, 4]], tokens=4, seconds=1.0, counters=counters)
    lines = "\n".join(summary(plain, ssd))
    for expected in ("2.00", "50%", "25%", "identical text: no, answer 1 parts after 2 tokens"):
        assert expected in lines


def test_separate_cores_are_some_of_those_available():
    assert separate_cores([0]) == [0]
