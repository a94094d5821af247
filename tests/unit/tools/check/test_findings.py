"""The screen, and what makes the exit status."""

import pytest

from vllm_ssd.tools.check.findings import Finding, could_start, gib, refusal, screen

FINE = Finding("ok", "vLLM", "0.33.0")
SLOW = Finding("note", "attention", "triton is wrong", "none: sdpa is used instead")
WRONG = Finding("bad", "draft", "has another vocabulary", "name another")


def test_each_remedy_is_below_its_fact():
    lines = screen([FINE, SLOW, WRONG]).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["ok", "note", "->", "bad", "->"]
    assert lines[3].endswith("has another vocabulary") and lines[4].endswith("-> name another")
    assert lines[-1] == "ssd could not start: 1 of 3 lines are bad, 1 to note"


@pytest.mark.parametrize(
    "found, end", [([FINE], "ssd can start"), ([FINE, SLOW], "ssd can start, 1 to note")]
)
def test_notes_do_not_keep_ssd_from_starting(found, end):
    assert could_start(found) and screen(found).splitlines()[-1] == end


def test_one_bad_line_does():
    assert not could_start([FINE, WRONG, SLOW])


def test_a_refusal_ends_with_its_remedy():
    finding = refusal("draft", ValueError("SSD: no room (a: b): free some"))
    assert finding == Finding("bad", "draft", "no room (a: b)", "free some")
    assert refusal("draft", ValueError("k must be 1")) == Finding("bad", "draft", "k must be 1")


def test_bytes_in_words():
    assert gib(2**30 * 1.5) == "1.50 GiB" and gib(2**30 * 139.2) == "139 GiB"
