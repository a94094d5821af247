"""The screen, and what makes the exit status."""

import pytest

from vllm_ssd import cli
from vllm_ssd.tools.check import command, software
from vllm_ssd.tools.check.findings import Finding, gib, refusal, summary

FINE = Finding("ok", "vLLM", "0.33.0")
SLOW = Finding("note", "attention", "triton is wrong", "none: sdpa is used instead")
WRONG = Finding("bad", "draft", "has another vocabulary", "name another")


def test_each_line_is_printed_as_soon_as_it_is_known(monkeypatch, capsys):
    def examine_software():
        yield FINE
        assert capsys.readouterr().out == f"{FINE.shown()}\n"
        yield WRONG

    monkeypatch.setattr(software, "examine_software", examine_software)
    assert cli.main(["check"]) == 1
    end = "ssd could not start: 1 of 2 lines are bad"
    assert capsys.readouterr().out == f"{WRONG.shown()}\n\n{end}\n"


@pytest.mark.parametrize(
    "found, end", [([FINE], "ssd can start"), ([FINE, SLOW], "ssd can start, 1 to note")]
)
def test_notes_do_not_keep_ssd_from_starting(found, end, monkeypatch, capsys):
    monkeypatch.setattr(command, "_look", lambda *_: iter(found))
    assert cli.main(["check"]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{end}\n") and summary(found) == end


def test_a_refusal_ends_with_its_remedy():
    finding = refusal("draft", ValueError("SSD: no room (a: b): free some"))
    assert finding == Finding("bad", "draft", "no room (a: b)", "free some")
    assert refusal("draft", ValueError("k must be 1")) == Finding("bad", "draft", "k must be 1")


def test_bytes_in_words():
    assert gib(2**30 * 1.5) == "1.50 GiB" and gib(2**30 * 139.2) == "139 GiB"
