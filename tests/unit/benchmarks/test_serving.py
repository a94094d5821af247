"""The served benchmarks without vLLM: command lines, sides, and what a load comes to."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from benchmarks.common.models import Model
from benchmarks.common.prompts import ANSWER
from benchmarks.common.server import ServerFailed
from benchmarks.serving import __main__ as serving
from benchmarks.serving.arguments import parse
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.clients.own import Answer, sum_up
from benchmarks.serving.measure import Measure, Started
from benchmarks.serving.records import KINDS, Kind, Load, Result, Run, Seen, Side, Spread
from benchmarks.serving.sides import Plan
from benchmarks.serving.table import markdown

TOGETHER = ("--sides", "plain,ssd", "--together")
OWN = ("--client", "own")


def side(name: str, kind: Kind = "plain", gpus: int = 1) -> Side:
    return Side(name, kind, gpus, {}, {})


def seen(tokens: int, text: str) -> Seen:
    """What a client saw in two seconds."""
    return Seen(1, 2.0, tokens, *[Spread(0, 0, 0)] * 5, [text])


def test_what_answers_come_to():
    """2 messages have 1 time between them, 9 tokens have 8. A chat's turns are requests."""
    turns = [Answer([0.5, 2.5], "a", 9), Answer([1.0, 2.0], "b", 3)]
    found = sum_up([turns, [Answer([3.0], "c", 1)]], 8.0)
    assert (found.completed, found.seconds, found.tokens) == (3, 8.0, 13)
    assert found.texts == [f"a{ANSWER}b", "c"]
    assert found.ttft == Spread(1500, 1000, pytest.approx(2960))
    means = found.e2e.mean, found.itl.mean, found.tpot.mean, found.gap.mean
    assert means == (2500, 1500, (250 + 500) / 2, 1000)


def test_a_side_that_fails_ends_no_other(monkeypatch):
    """Servers of a side count together. Each load has prompts of its own; w is of the warm-up."""
    client = SimpleNamespace(measure=lambda task: seen(task.load.tokens, task.prompts[0]))
    monkeypatch.setitem(CLIENTS, "own", client)
    up = SimpleNamespace(url="", run_dir=lambda: None, wait_healthy=lambda limit_s: None)
    down = SimpleNamespace(wait_healthy=Mock(side_effect=ServerFailed("no memory left")), log="log")
    prompts = SimpleNamespace(take=lambda load, first: ["abcw"[first]] * load.requests)
    loads = [Load("d", 2, 5, 1), Load("d", 1, 6, 1)]
    subjects = [Started(side("one"), [up, up]), Started(side("broken"), [down])]
    *_, (one, broken) = Measure(["own"], loads, prompts, "t", 1.0).started(subjects)
    assert (one.error, broken.error) == (None, "no memory left") and not broken.runs
    assert [run.seen.completed for run in one.runs] == [2, 2]
    assert [run.seen.tokens for run in one.runs] == [10, 12]
    assert [run.seen.texts for run in one.runs] == [["a"], ["c"]]


@pytest.mark.parametrize(("per_gpu", "share"), [(False, 1.0), (True, 0.5)])
def test_ratios_are_to_the_fastest_side_of_a_kind_under_the_same_load(per_gpu, share):
    def result(subject: Side, *figures: tuple[int, int, str]) -> Result:
        """figures: clients, tokens, text."""
        loads = [Load("d", 1, 5, clients) for clients, *_ in figures]
        return Result(subject, [Run("own", o, seen(*f)) for o, (_, *f) in zip(loads, figures)])

    results = [
        result(side("plain"), (1, 100, "a"), (2, 300, "a")),
        result(side("slow", "ssd-f0", 2), (1, 110, "a")),
        result(side("fast", "ssd-f0", 2), (1, 120, "a")),
        result(side("ssd", "ssd", 2), (1, 150, "b"), (2, 330, "a")),
        Result(side("broken"), error="no memory left"),
    ]
    text = markdown(results, per_gpu)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line]
    (few, many) = (dict(zip(rows[0], row)) for row in rows if "ssd" in row)
    assert (few["tokens/s"], many["tokens/s"]) == ("75.0", "165.0")
    assert few["x plain"] == f"{1.5 * share:.2f}" and many["x plain"] == f"{1.1 * share:.2f}"
    assert (few["x ssd-f0"], many["x ssd-f0"]) == ("1.25", "–")
    assert (few["texts as plain"], many["texts as plain"]) == ("0 of 1", "1 of 1")
    assert "broken failed:\n\n```\nno memory left" in text


def plan(**given) -> Plan:
    defaults = {"engine": {"model": "t"}, "kinds": KINDS, "gpus": 4, "eagle3": "head"}
    drafts = [Model("one", "one", "auto", "one")]
    return Plan(**{**defaults, "drafts": drafts, "k": [7], "f": [3], "other_k": [3], **given})


def test_every_side():
    sides = {side.name: side for side in plan().sides()}
    names = "plain, draft_model k=3, ngram k=3, eagle3 k=3, ssd-f0 k=7, ssd k=7 f=3"
    assert list(sides) == names.split(", ")
    told = {name: side.engine.get("speculative_config") for name, side in sides.items()}
    assert told["plain"] is None and told["eagle3 k=3"]["model"] == "head"
    assert told["ssd k=7 f=3"] == {"method": "ssd", "model": "one", "k": 7, "f": 3}
    assert told["ssd-f0 k=7"]["f"] == 0 and told["ssd-f0 k=7"]["on_miss"] == "wait"
    (given,) = plan(kinds=["eagle3"], accepted=[2.5]).sides()
    assert given.engine["speculative_config"]["synthetic_acceptance_length"] == 2.5
    options = [{}, {"draft_device": 2}, {"draft_device": "1"}]
    two = {"engine": {"data_parallel_size": 2}, "options": options}
    assert [each.gpus for each in plan(kinds=["ssd"], **two).sides()] == [3, 3, 2]
    small = plan(engine={"tensor_parallel_size": 2}, kinds=["plain", "ssd"], gpus=2)
    assert [side.name for side in small.sides()] == ["plain"]
    assert small.left_out() == ["ssd k=7 f=3 needs 3 GPUs of 2"]
    args = parse([*TOGETHER, "plain=1", "ssd=0,1"], None)
    [group] = serving._groups(plan(kinds=args.sides).sides(), args.together)
    assert [side.environment["CUDA_VISIBLE_DEVICES"] for side in group] == ["1", "0,1"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--sides", "plain,magic"], "no such sides: magic; choose from plain, draft_model"),
        (["--sides", "plain,eagle3"], "--sides eagle3 needs a head"),
        (["--prompt-tokens", "4096"], "need --max-model-len 4416 or more"),
        (["--client", "vllm,own", "--turns", "5"], "--turns needs --client own"),
        (["--eagle3", "standin", "--accepted", "4.5"], "4.5: with k=3 a round has 1 to 4 tokens"),
        ([*TOGETHER, "plain=1", "sssd=0"], "'sssd=0' is not a kind of side and its GPUs"),
        ([*OWN, "--dataset", "none.jsonl"], "there is no file none.jsonl"),
        ([*OWN, "--target", "hub/name", "--eagle3", "standin"], "hub/name is none"),
        ([*OWN, "--max-model-len", "9000"], "smollm2 takes texts of 8192 tokens"),
    ],
)
def test_a_bad_command_is_refused_before_anything_starts(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setattr(serving, "visible_gpus", lambda: pytest.fail("it has started"))
    try:
        status = serving.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2 and sentence in capsys.readouterr().err
