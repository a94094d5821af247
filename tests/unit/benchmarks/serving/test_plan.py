"""The served benchmark without servers: its command line, loads and sides."""

import pytest

from benchmarks.common.models import Model
from benchmarks.serving import __main__ as serving
from benchmarks.serving.arguments import loads, parse
from benchmarks.serving.records import KINDS, Load, Result, Run, Seen, Spread
from benchmarks.serving.sides import Plan
from benchmarks.serving.table import markdown

PLAIN_AND_SSD = ("--sides", "plain,ssd", "--together")
ONE, TWO = Model("one", "one", "auto", "one"), Model("two", "two", "auto", "two")


def plan(**given) -> Plan:
    defaults = {"engine": {"model": "t"}, "kinds": KINDS, "drafts": [ONE], "gpus": 4}
    return Plan(**{**defaults, "k": [7], "f": [3], "other_k": [3], **given})


def test_every_side():
    sides = {side.name: side for side in plan(eagle3="head").sides()}
    assert list(sides) == [
        "plain",
        "draft_model k=3",
        "ngram k=3",
        "eagle3 k=3",
        "ssd-f0 k=7",
        "ssd k=7 f=3",
    ]
    told = {name: side.engine.get("speculative_config") for name, side in sides.items()}
    assert told["plain"] is None and told["eagle3 k=3"]["model"] == "head"
    assert told["ssd k=7 f=3"] == {"method": "ssd", "model": "one", "k": 7, "f": 3}
    assert told["ssd-f0 k=7"]["f"] == 0 and told["ssd-f0 k=7"]["on_miss"] == "wait"
    assert [sides["plain"].gpus, sides["ssd k=7 f=3"].gpus] == [1, 2]


def test_what_is_varied_is_a_side():
    several = plan(
        kinds=["ssd", "ssd-f0", "draft_model"],
        drafts=[ONE, TWO],
        k=[3, 5],
        options=[{"on_miss": "skip"}, {}],
    )
    names = [side.name for side in several.sides()]
    assert len(names) == len(set(names)) == 8 + 8 + 2
    assert "ssd k=3 f=3 on_miss=skip draft=two" in names and "draft_model k=3 draft=one" in names


def test_without_a_head_there_is_no_eagle3():
    assert plan(kinds=["eagle3"]).sides() == []


def test_each_acceptance_that_a_head_is_given_is_a_side():
    heads = plan(kinds=["eagle3"], eagle3="head", other_k=[3, 5], accepted=[2.5, 3.0]).sides()
    assert [side.name for side in heads][1:3] == ["eagle3 k=5 given 2.5", "eagle3 k=3 given 3"]
    told = heads[0].engine["speculative_config"]
    assert told["model"] == "head" and told["synthetic_acceptance_length"] == 2.5
    assert told["draft_load_config"] == {"load_format": "standin-head"}, "not the target's"
    assert parse(["--eagle3", "standin"], None).accepted == [2.5, 3.0, 3.5]
    assert not parse(["--eagle3", "head"], None).accepted, "a trained one is measured"


def test_the_table_says_what_was_given():
    side, other = plan(kinds=["plain", "eagle3"], eagle3="head", accepted=[2.5]).sides()
    times = Spread(1.0, 1.0, 1.0)
    seen = Seen(1, 1.0, 9, times, times, times, times, times, ["text"])
    run = Run("own", Load("passages", 1, 9), seen)
    text = markdown([Result(side, [run]), Result(other, [run])])
    assert "eagle3 k=3 given 2.5: tokens a round are given, not measured. The head has no" in text
    assert "texts as plain" not in text, "one that drafts nonsense has another text"
    assert "given" not in markdown([Result(side, [run])])


def test_sides_that_need_more_gpus_are_left_out_and_named():
    small = plan(kinds=["plain", "ssd"], tps=[1, 2], gpus=2)
    assert [side.name for side in small.sides()] == ["plain TP 1", "ssd k=7 f=3 TP 1", "plain TP 2"]
    assert small.left_out() == ["ssd k=7 f=3 TP 2 needs 3 GPUs of 2"]
    assert len(plan(tps=[1, 2], gpus=0, kinds=["ssd"]).sides()) == 2, "CPUs have no such number"
    assert "GPU" in plan(kinds=["eagle3"], eagle3="head", accepted=[3], gpus=0).left_out()[0]


def test_requests_for_every_place():
    args = parse(["--concurrency", "1,16", "--requests-per-client", "3"], None)
    assert [load.requests for load in loads(args)] == [8, 48]
    assert [load.prompt_tokens for load in loads(args)] == [128, 128], "passages have no length"
    assert loads(parse(["--dataset", "gsm8k"], None))[0].prompt_tokens is None
    args = parse(["--quick", "--client", "own", "--turns", "5"], None)
    assert loads(args)[0].turns == 5 and args.max_model_len == 1280


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--sides", "plain,magic"], "no such sides: magic; choose from plain, draft_model"),
        (["--client", "curl"], "no such clients: curl; choose from vllm, own"),
        (["--prompt-tokens", "4096"], "need --max-model-len 4416 or more"),
        (["--client", "own", "--turns", "5"], "need --max-model-len 2240 or more"),
        (["--client", "vllm,own", "--turns", "5"], "--turns needs --client own"),
        (["--eagle3", "standin", "--accepted", "4.5"], "4.5: with k=3 a round has 1 to 4 tokens"),
        ([*PLAIN_AND_SSD, "plain=1"], "--together says nothing of ssd"),
        ([*PLAIN_AND_SSD, "plain=1", "ssd"], "'ssd' is not a kind of side and its GPUs"),
        ([*PLAIN_AND_SSD, "plain=1", "sssd=0"], "'sssd=0' is not a kind of side and its GPUs"),
    ],
)
def test_a_bad_command_line(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        serving.main(arguments)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--client", "own", "--dataset", "nothing"], "no data set 'nothing': write passages"),
        (["--client", "own", "--dataset", "none.jsonl"], "there is no file none.jsonl"),
        (["--client", "own", "--target", "hub/name", "--eagle3", "standin"], "hub/name is none"),
        (["--client", "own", "--max-model-len", "9000"], "smollm2 takes texts of 8192 tokens"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setattr(serving, "visible_gpus", lambda: pytest.fail("it has started"))
    assert serving.main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_sides_together_have_the_gpus_that_they_are_given():
    args = parse([*PLAIN_AND_SSD, "plain=1", "ssd=0,1", "--repeats", "2"], None)
    [group] = serving._groups(plan(kinds=args.sides).sides(), args.together)
    assert [side.environment["CUDA_VISIBLE_DEVICES"] for side in group] == ["1", "0,1"]
    assert [load.repeat for load in loads(args)][:: len(args.concurrency)] == [0, 1]
    alone = serving._groups(plan(kinds=args.sides).sides(), [])
    assert [len(group) for group in alone] == [1, 1]
