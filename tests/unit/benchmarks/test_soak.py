"""What the soak finds wrong, without servers."""

import pytest

from benchmarks.soak.requests import CHOICES, Choice, Request, difference, malformed

PLAIN = Choice("one two, three", [1, 2, 3, 4], "length", [3.0, 0.5, 2.0, 1.0])
GRAMMAR = {"temperature": 1, "structured_outputs": {"choice": CHOICES}}


def asked(**body: object) -> Request:
    return Request(7, {"temperature": 0, "max_tokens": 4, **body})


def test_a_text_that_parts_from_the_plain_servers_is_found() -> None:
    for count in range(5):
        assert difference(asked(), Choice("", PLAIN.tokens[:count]), PLAIN) is None
    found = difference(asked(), Choice("", [1, 9, 3]), PLAIN)
    assert found is not None and "question 7 parts after 1 tokens: [9, 3]" in found
    assert "margin was 0.5" in found


@pytest.mark.parametrize(
    ("body", "choice", "right"),
    [
        ({}, Choice("", [5, 6, 7, 8], "length"), True),
        ({}, Choice("", [5, 6, 7], "length"), False),
        ({}, Choice("", [5, 6, 7, 8]), False),
        ({"stop": ","}, Choice("one two", [1, 2, 3], "stop"), True),
        ({"stop": ","}, Choice("one two,", [1, 2, 3], "stop"), False),
        ({"stop": ","}, PLAIN, False),
        (GRAMMAR, Choice(CHOICES[0], [1, 2, 3], "stop"), True),
        (GRAMMAR, Choice("one two", [1, 2, 3], "stop"), False),
        (GRAMMAR, Choice(CHOICES[0][:9], [1, 2, 3, 4], "length"), True),
        (GRAMMAR, Choice(CHOICES[0][:9], [1, 2, 3], "length"), False),
    ],
)
def test_answers_end_as_asked(body: dict[str, object], choice: Choice, right: bool) -> None:
    assert (malformed(asked(**body), choice) is None) is right
