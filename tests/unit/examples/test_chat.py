"""What the chat says of an answer, and which servers it starts."""

from types import SimpleNamespace

import httpx
import pytest
from openai import BadRequestError
from rich.console import Console

from examples.chat import __main__ as chat
from examples.chat.answer import Answer
from examples.chat.counters import between, parse

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


@pytest.mark.parametrize("compare", [[], ["--compare"], ["--compare", "http://plain:8000"]])
def test_servers_of_its_own_are_ssd_and_a_plain_one_only_without_an_address(compare):
    words = ["--serve", "TARGET", "--draft", "DRAFT", "--k", "5", "--max-model-len", "99"]
    sides = chat.own_servers(chat.parser().parse_args([*words, *compare]))
    plain = {"model": "TARGET", "max_model_len": 99}
    speculation = {"method": "ssd", "k": 5, "f": None, "model": "DRAFT"}
    assert sides["ssd"] == {**plain, "speculative_config": speculation}
    assert [sides.get("plain")] == ([plain] if compare == ["--compare"] else [None])


def test_what_is_not_there_is_one_sentence(capsys):
    with pytest.raises(SystemExit):
        chat.main(["--compare"])
    assert "--compare needs the address of a plain server" in capsys.readouterr().err
    assert chat.main(["--url", "http://127.0.0.1:9"]) == 1  # the port of "discard"
    assert "No answer from http://127.0.0.1:9" in capsys.readouterr().err


def test_a_conversation_that_is_too_long_does_not_end_the_chat(monkeypatch, tmp_path, capsys):
    def ask(*_):
        reply = httpx.Response(400, request=httpx.Request("POST", "http://a"))
        raise BadRequestError("too long", response=reply, body=None)

    said = iter(["Why?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    monkeypatch.setattr(chat, "HISTORY", tmp_path / "history")
    chat.chat(Console(), {"ssd": SimpleNamespace(model="m", url="u", ask=ask)}, 0.0, 9)
    assert "too long: /new begins a new" in capsys.readouterr().out
