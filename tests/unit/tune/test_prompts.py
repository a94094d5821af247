"""Prompts of users, in the forms that they may have, and command lines that are refused."""

from __future__ import annotations

import pytest

from tests.support.model_folders import write_model
from tests.support.sentences import one_sentence
from vllm_ssd import cli
from vllm_ssd.tune.prompts import built_in, in_turn, read_prompts, token_ids
from vllm_ssd.tune.records import Prompt


class Tokenizer:
    """A token for each character, and a template that can be seen."""

    chat_template = "a template"

    def encode(self, text, add_special_tokens=True):
        return [ord(each) for each in ("^" if add_special_tokens else "") + text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert add_generation_prompt and not tokenize
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"


def text_of(prompt: Prompt, tokenizer=None) -> str:
    return "".join(map(chr, token_ids(prompt, tokenizer or Tokenizer())))


def test_lines_are_questions(tmp_path):
    path = tmp_path / "questions.txt"
    path.write_text("One?\n\nTwo?\n")
    assert [text_of(each) for each in read_prompts(path)] == [
        "<user>One?<assistant>",
        "<user>Two?<assistant>",
    ]


def test_json_lines_are_chats_or_texts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"messages": [{"role": "system", "content": "Be brief."}]}\n{"prompt": "Once upon"}\n'
    )
    chat, text = read_prompts(path)
    assert text_of(chat) == "<system>Be brief.<assistant>"
    assert text_of(text) == "^Once upon", "as it is"


def test_a_model_without_a_chat_template(monkeypatch):
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    assert text_of(built_in()[1]).startswith("^Explain")


def test_prompts_go_in_a_circle():
    assert in_turn([[1], [2], [3]], 2, 4) == [[3], [1], [2], [3]]


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.txt", "\n \n", "no prompts"),
        ("a.jsonl", '{"prompt": 1}', "prompt 1 of"),
        ("a.jsonl", '{"prompt": "a"}\n{"question": "b"}', "prompt 2 of"),
        ("a.jsonl", '{"prompt": "a", "messages": []}', "write one of them"),
        ("a.txt", None, "cannot be read"),
    ],
)
def test_files_that_have_none(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as error:
        read_prompts(tmp_path / name)
    assert said in one_sentence(error)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--k", "0,3"], "--k is 0,3: write numbers from 1 on"),
        (["--requests", "1"], "--requests is 1: write numbers from 3 on"),
        (["--prompts", "/nowhere/a.txt"], "/nowhere/a.txt cannot be read"),
        (["--draft", "OTHER"], "different vocabularies"),
        (["--speculative-config", '{"k": 3, "on_mis": "wait"}'], "did you mean 'on_miss'?"),
    ],
)
def test_nothing_is_started_for_a_bad_command(tmp_path, monkeypatch, capfd, words, said):
    monkeypatch.chdir(tmp_path)
    places = [tmp_path / name for name in ("target", "draft", "other")]
    for place in places:
        place.mkdir()
    write_model(places[0], layers=2)
    write_model(places[1])
    other = write_model(places[2], words=[f"v{i}" for i in range(60)])
    words = [other if word == "OTHER" else word for word in words]
    line = ["tune", str(places[0]), "--draft", str(places[1]), "--dtype", "float32"]
    assert cli.main([*line, "--enforce-eager", *words]) == 2
    assert said in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "ssd-tune.jsonl").exists()
