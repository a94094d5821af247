"""What the chat shows of an answer: its speed, the server's counters, two answers side by side."""

import io
import math

import pytest
from rich.console import Console

from examples.chat import __main__ as chat
from examples.chat.answer import Answer
from examples.chat.counters import Speculation, between, parse
from examples.chat.screen import show_beside, show_one

SSD = """\
# TYPE vllm:ssd_rounds counter
vllm:ssd_rounds_total{{engine="0",model_name="m",result="hit"}} {hit}
vllm:ssd_rounds_total{{engine="1",model_name="m",result="hit"}} {hit}
vllm:ssd_rounds_total{{engine="0",model_name="m",result="miss"}} {miss}
vllm:ssd_rounds_total{{engine="0",model_name="m",result="late"}} 1.0
vllm:ssd_rounds_total{{engine="0",model_name="m",result="off"}} 9.0
# TYPE vllm:ssd_round_tokens histogram
vllm:ssd_round_tokens_bucket{{engine="0",model_name="m",le="+Inf"}} {rounds}
vllm:ssd_round_tokens_count{{engine="0",model_name="m"}} {rounds}
vllm:ssd_round_tokens_sum{{engine="0",model_name="m"}} {tokens}
"""
VLLM = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
"""


def test_hits_and_tokens_a_round_are_those_between_two_looks():
    earlier = parse(SSD.format(hit=10.0, miss=5.0, rounds=4, tokens=20))
    later = parse(SSD.format(hit=13.0, miss=7.0, rounds=8, tokens=32))
    # 6 hits on both engines and 2 misses; 12 tokens in 4 rounds
    assert between(earlier, later) == Speculation(tokens_per_round=3.0, hit_rate=0.75)


def test_rounds_without_draft_tokens_are_said():
    earlier, later = (f'{{engine="0",result="off"}} {count}' for count in (4.0, 10.0))
    name = "vllm:ssd_rounds_total"
    all_off = between(parse(name + earlier + "\n"), parse(name + later + "\n"))
    assert Answer(speculation=all_off).summary().endswith("tokens/s, without draft tokens")
    some_off = Speculation(tokens_per_round=3.0, hit_rate=0.5, off_rate=0.25)
    assert Answer(speculation=some_off).summary().endswith("25% of the rounds without draft tokens")


def test_a_server_without_ssds_metrics_has_tokens_a_round_by_vllms_own():
    earlier = parse(VLLM.format(drafts=2.0, accepted=2.0))
    later = parse(VLLM.format(drafts=6.0, accepted=12.0))
    assert between(earlier, later) == Speculation(tokens_per_round=3.5, hit_rate=None)


def test_a_plain_server_has_neither():
    assert between(parse(""), parse("")) == Speculation(None, None)


def test_summary_counts_decoding_after_the_first_token():
    answer = Answer("text", tokens=21, asked=10.0, ended=12.5, first_s=0.5)
    answer.speculation = Speculation(tokens_per_round=3.25, hit_rate=0.6)
    assert answer.summary() == (
        "21 tokens, 10.0 tokens/s, first token after 500 ms, 3.25 tokens a round, 60% hits"
    )


def test_summary_of_a_plain_servers_only_token():
    answer = Answer("a", tokens=1, asked=1.0, ended=1.25, first_s=0.25)
    assert answer.summary() == "1 tokens, 0.0 tokens/s, first token after 250 ms"


def growing(*texts, tokens_per_second=10.0):
    """An answer as an endpoint yields it."""
    answer = Answer(asked=0.0)
    for text in texts:
        answer.text, answer.first_s, answer.ended = text, 0.0, 20 / tokens_per_second
        yield answer
    answer.tokens = 21
    yield answer


def printed(show):
    console = Console(file=io.StringIO(), width=80, height=24)
    show(console)
    return console.file.getvalue()


def test_one_answer_is_written_as_it_is_with_its_summary():
    shown = printed(lambda console: show_one(console, growing("[b]He", "[b]Hello [1]")))
    assert shown == "[b]Hello [1]\n21 tokens, 10.0 tokens/s, first token after 0 ms\n"


def test_a_stopped_answer_keeps_its_beginning():
    def interrupted():
        yield from [next(growing("Hel"))]
        raise KeyboardInterrupt

    console = Console(file=io.StringIO())
    assert show_one(console, interrupted()).text == "Hel"
    assert "stopped" in console.file.getvalue()


@pytest.mark.parametrize(
    "speed, said",
    [(30.0, "\nssd: 3.00 times plain; texts differ\n"), (math.inf, "\ntexts differ\n")],
)
def test_two_answers_are_beside_each_other_with_their_ratio(speed, said):
    """One that came in one piece has no speed."""
    streams = [
        lambda: growing("left answer", tokens_per_second=speed),
        lambda: growing("right answer", tokens_per_second=10.0),
    ]
    shown = printed(lambda console: show_beside(console, ["ssd", "plain"], streams))
    assert any("left answer" in line and "right answer" in line for line in shown.splitlines())
    assert said in shown


def test_an_error_of_one_of_two_servers_is_raised():
    def failing():
        yield Answer()
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        printed(lambda console: show_beside(console, ["a", "b"], [lambda: growing("x"), failing]))


def test_a_comparison_without_an_address_needs_a_server_to_start(capsys):
    with pytest.raises(SystemExit):
        chat.main(["--compare"])
    assert "--compare needs the address of a plain server" in capsys.readouterr().err


@pytest.mark.parametrize("compare", [[], ["--compare"], ["--compare", "http://plain:8000"]])
def test_servers_of_its_own_are_ssd_and_a_plain_one_only_without_an_address(compare):
    words = ["--serve", "TARGET", "--draft", "DRAFT", "--k", "5", "--max-model-len", "99"]
    sides = chat.own_servers(chat.parser().parse_args([*words, *compare]))
    plain = {"model": "TARGET", "max_model_len": 99}
    speculation = {"method": "ssd", "k": 5, "f": 3, "model": "DRAFT"}
    assert sides["ssd"] == {**plain, "speculative_config": speculation}
    assert [sides.get("plain")] == ([plain] if compare == ["--compare"] else [None])


def test_a_server_that_is_not_there_is_one_sentence(capsys):
    assert chat.main(["--url", "http://127.0.0.1:9"]) == 1  # the port of "discard"
    assert "No answer from http://127.0.0.1:9" in capsys.readouterr().err
