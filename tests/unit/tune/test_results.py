"""What is kept of a tuning, what is said at its end, and its picture."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from xml.etree import ElementTree

import msgspec
import pytest

from tests.support.sentences import one_sentence
from vllm_ssd.tune.command import _Bench
from vllm_ssd.tune.plot import plot
from vllm_ssd.tune.prompts import built_in
from vllm_ssd.tune.records import PLAIN, Candidate, Figures, Load, Outcome, Setting, speedup
from vllm_ssd.tune.report import report
from vllm_ssd.tune.results import Results
from vllm_ssd.tune.search import Enough

SETTING = Setting("target", ["-tp", "2"], Load([1, 8], 8, 256), built_in(), "2 GPUs", "vllm 0.33")
FAST, SLOW = Candidate("draft", 7, 3), Candidate("draft", 2, 3)


def outcome(candidate: Candidate, *rates: float) -> Outcome:
    """Of a candidate with these tokens a second, at 1 and at 8 clients."""
    hit = None if candidate == PLAIN else 0.75
    return Outcome(
        candidate,
        [Figures(clients, rate, 2.5, 20.0, hit) for clients, rate in zip((1, 8), rates)],
    )


MEASURED = [outcome(PLAIN, 50, 400), outcome(SLOW, 60, 300), outcome(FAST, 200, 400)]
FAILED = Outcome(Candidate("draft", 10, 3), error="exit status 1\nno memory left")


def test_speedup_is_a_geometric_mean():
    assert speedup(MEASURED[2], MEASURED[0]) == pytest.approx(2.0)
    assert speedup(FAILED, MEASURED[0]) == 0


def test_a_second_call_knows_what_the_first_measured(tmp_path):
    path = tmp_path / "results.jsonl"
    first = Results(path, SETTING)
    for each in [*MEASURED, FAILED]:
        first.add(each)
    assert first.of(FAILED.candidate) == FAILED
    again = Results(path, SETTING)
    assert again.all() == MEASURED and again.of(FAST) == MEASURED[2]
    assert again.of(FAILED.candidate) is None, "it is tried again"
    for other in ({"target": "another"}, {"load": Load([1], 8, 256)}, {"versions": "vllm 0.34"}):
        assert not Results(path, msgspec.structs.replace(SETTING, **other)).all()


def test_a_line_that_was_not_written_to_its_end(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"setting": ')
    with pytest.raises(ValueError) as error:
        Results(path, SETTING)
    assert "name another with --results" in one_sentence(error)


def test_the_best_is_first_and_its_options_are_last():
    said = report([*MEASURED, FAILED], {"on_miss": "wait"}, "target on 2 GPUs")
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("|")]
    names = ["draft k=7 f=3", "plain vLLM", "draft k=2 f=3", "draft k=10 f=3"]
    assert [row[0].removeprefix("| ") for row in rows[2:]] == names
    assert {len(row) for row in rows} == {11} and rows[5][1] == "failed"
    assert rows[2][1:6] == ["200.0", "4.00", "2.50", "20.0", "75%"]
    assert "Use draft k=7 f=3: 2.00 times plain vLLM" in said
    flag, _, options = said.splitlines()[-1].partition(" ")
    assert flag == "--speculative-config"
    chosen = {"on_miss": "wait", "method": "ssd", "model": "draft", "k": 7, "f": 3}
    assert json.loads(options.strip("'")) == chosen


@pytest.mark.parametrize("others", [[MEASURED[1]], [FAILED]], ids=["slow", "failed"])
def test_the_answer_may_be_no(others):
    said = report([MEASURED[0], *others], {}, "target on 2 GPUs")
    assert "Leave ssd off: " in said and "--speculative-config" not in said


def test_the_picture_has_a_bar_for_each(tmp_path):
    path = tmp_path / "plot.svg"
    plot([*MEASURED, FAILED], path)
    words = [each.text for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    names = {"plain vLLM", "draft k=7 f=3", "draft k=2 f=3", "draft k=10 f=3"}
    assert names & set(words) == names - {"draft k=10 f=3"}


@dataclass
class Measurer:
    """Knows what candidates would yield."""

    asked: list[Candidate] = field(default_factory=list)

    def __call__(self, candidate, say):
        self.asked.append(candidate)
        return next(each for each in [*MEASURED, FAILED] if each.candidate == candidate)


def test_each_candidate_is_measured_once(tmp_path):
    path = tmp_path / "results.jsonl"
    for expected in ([PLAIN, FAST, FAILED.candidate], [FAILED.candidate]):
        measurer = Measurer()
        bench = _Bench(Results(path, SETTING), measurer, most=2)
        bench.outcome(PLAIN)
        assert bench.score(FAST) == bench.score(FAST) == pytest.approx(2.0)
        assert bench.score(FAILED.candidate) == 0
        with pytest.raises(Enough):
            bench.score(SLOW)
        assert measurer.asked == expected
