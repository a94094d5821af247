"""Prompts of users, in the forms that they may have, and commands that are refused."""

from __future__ import annotations

import pytest

from tests.support.model_folders import write_model
from tests.support.sentences import one_sentence
from vllm_ssd import cli
from vllm_ssd.tools.tune.prompts import read_prompts


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.txt", "One?\n\nTwo?\n"),
        ("a.jsonl", '{"prompt": "One?"}\n{"prompt": "Two?", "id": 2}\n'),
    ],
)
def test_prompts_of_a_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == ["One?", "Two?"]


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.txt", "\n \n", "there are no prompts in"),
        ("a.jsonl", '{"prompt": 1}', "cannot be read as prompts"),
        ("a.jsonl", '{"prompt": "a"}\n{"question": "b"}', "cannot be read as prompts"),
        ("a.txt", None, "cannot be read as prompts"),
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
        ("--draft draft --k 0,3", "--k is [0, 3]: write numbers from 1 on"),
        ("--draft draft --requests 0", "--requests is 0: write numbers from 1 on"),
        ("--draft draft --prompts /nowhere/a.txt", "/nowhere/a.txt cannot be read"),
        ("--draft draft --draft other", "different vocabularies"),
        ('--draft draft -sc {"on_mis":1}', "did you mean 'on_miss'?"),
        ("--draft draft --speculative-config.on_miss wait", "write --speculative-config '{...}'"),
        ("--k 2", "no default draft is known"),
    ],
)
def test_nothing_is_started_for_a_bad_command(tmp_path, monkeypatch, capfd, words, said):
    monkeypatch.chdir(tmp_path)
    for name in ("target", "draft", "other"):
        (tmp_path / name).mkdir()
    write_model(tmp_path / "target", layers=2)
    write_model(tmp_path / "draft")
    write_model(tmp_path / "other", words=[f"v{i}" for i in range(60)])
    line = ["tune", "target", *words.split(), "--dtype", "float32", "--enforce-eager"]
    assert cli.main(line) == 2
    assert said in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "ssd-tune").exists()
