"""What the chat shows of an answer: its speed, the server's counters, two answers side by side."""

import io

import pytest
from rich.console import Console

from examples.chat import __main__ as chat
from examples.chat.answer import Answer
from examples.chat.counters import between, parse
from examples.chat.screen import show_beside, show_one

HITS, MISSES, OFF = (f'vllm:ssd_rounds_total{{result="{r}"}}' for r in ("hit", "miss", "off"))
ROUNDS, TOKENS = (f"vllm:ssd_round_tokens_{name}" for name in ("count", "sum"))
DRAFTS, ACCEPTED = (f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "accepted_tokens"))


@pytest.mark.parametrize(
    "since, said",
    [
        ({HITS: 6, MISSES: 2, ROUNDS: 4, TOKENS: 12}, ", 3.00 tokens a round, 75% hits"),
        ({HITS: 6, MISSES: 2, OFF: 8}, "75% hits, 50% of the rounds without draft"),
        ({OFF: 6}, ", without draft tokens"),
        ({DRAFTS: 4, ACCEPTED: 10}, ", 3.50 tokens a round"),
        ({}, "first token after 500 ms"),
    ],
)
def test_the_summary_is_of_what_was_counted_meanwhile(since, said):
    """By ssd's metrics, or by vLLM's own; speed is that of what follows the first token."""

    def text(more):
        counted = {name: 10 + more * count for name, count in since.items()}
        return parse("".join(f"{name} {count}\n" for name, count in counted.items()))

    answer = Answer("text", tokens=21, asked=10.0, ended=12.5, first_s=0.5)
    answer.speculation = between(text(0), text(1))
    assert answer.summary().startswith("21 tokens, 10.0 tokens/s, first token after 500 ms")
    assert said in answer.summary()


def growing(*texts, tokens_per_second=10.0):
    """An answer as an endpoint yields it."""
    answer = Answer(asked=0.0)
    for text in texts:
        answer.text, answer.first_s, answer.ended = text, 0.0, 20 / tokens_per_second
        yield answer
    answer.tokens = 21
    yield answer


def interrupted():
    yield next(growing("Hel"))
    raise KeyboardInterrupt


def failing():
    yield Answer()
    raise ConnectionError("gone")


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80, height=24)


def test_one_answer_is_written_as_it_is_until_it_is_stopped(console):
    show_one(console, growing("[b]He", "[b]Hello [1]"))
    shown = console.file.getvalue()
    assert shown == "[b]Hello [1]\n21 tokens, 10.0 tokens/s, first token after 0 ms\n"
    assert show_one(console, interrupted()).text == "Hel"
    assert "stopped" in console.file.getvalue()


def test_two_answers_are_beside_each_other_with_their_ratio(console):
    streams = [lambda: growing("left", tokens_per_second=30.0), lambda: growing("right")]
    show_beside(console, ["ssd", "plain"], streams)
    shown = console.file.getvalue()
    assert any("left" in line and "right" in line for line in shown.splitlines())
    assert "\nssd: 3.00 times plain; texts differ\n" in shown
    with pytest.raises(ConnectionError, match="gone"):
        show_beside(console, ["a", "b"], [lambda: growing("x"), failing])


@pytest.mark.parametrize("compare", [[], ["--compare"], ["--compare", "http://plain:8000"]])
def test_servers_of_its_own_are_ssd_and_a_plain_one_only_without_an_address(compare):
    words = ["--serve", "TARGET", "--draft", "DRAFT", "--k", "5", "--max-model-len", "99"]
    sides = chat.own_servers(chat.parser().parse_args([*words, *compare]))
    plain = {"model": "TARGET", "max_model_len": 99}
    speculation = {"method": "ssd", "k": 5, "f": 3, "model": "DRAFT"}
    assert sides["ssd"] == {**plain, "speculative_config": speculation}
    assert [sides.get("plain")] == ([plain] if compare == ["--compare"] else [None])


def test_what_is_not_there_is_one_sentence(capsys):
    with pytest.raises(SystemExit):
        chat.main(["--compare"])
    assert "--compare needs the address of a plain server" in capsys.readouterr().err
    assert chat.main(["--url", "http://127.0.0.1:9"]) == 1  # the port of "discard"
    assert "No answer from http://127.0.0.1:9" in capsys.readouterr().err
