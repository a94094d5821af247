"""Prompts of users, in the forms that they may have, and commands that are refused."""

from __future__ import annotations

import pytest

from tests.support.model_folders import write_model
from tests.support.sentences import one_sentence
from vllm_ssd import cli
from vllm_ssd.tools.tune.measure import Failed, Measurer
from vllm_ssd.tools.tune.prompts import read_prompts


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Calls the command for a target, in a folder that has drafts, too; its exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # or it is refused where memory is short
    for name in ("target", "draft", "other"):
        (tmp_path / name).mkdir()
    write_model(tmp_path / "target", layers=2)
    write_model(tmp_path / "draft")
    write_model(tmp_path / "other", words=[f"v{i}" for i in range(60)])
    engine = ["--dtype", "float32", "--enforce-eager"]
    return lambda *words: cli.main(["tune", "target", *words, *engine])


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
        ("--draft draft --k 0,3", "--k 0 is too low: write 1 or more"),
        ("--draft draft --requests 0", "--requests 0 is too low: write 1 or more"),
        ("--draft draft --limit=-5", "--limit -5 is too low: write 1 or more"),
        ("--draft draft --prompts /nowhere/a.txt", "/nowhere/a.txt cannot be read"),
        ("--draft draft --draft other", "different vocabularies"),
        ('--draft draft -sc {"on_mis":1}', "did you mean 'on_miss'?"),
        (
            "--draft draft --speculative-config.on_miss wait",
            "as one JSON object, --speculative-config '{...}'",
        ),
        ("--k 2", "no default draft is known"),
    ],
)
def test_nothing_is_started_for_a_bad_command(tune, tmp_path, capfd, words, said):
    assert tune(*words.split()) == 2
    assert said in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "ssd-tune").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        ("--k 8,", "argument --k: '8,' is not a list of whole numbers: write them as in 2,3,5"),
        ("-sc [1]", "'[1]' is not a JSON object: write options as in '{\"on_miss\":\"wait\"}'"),
        ("-sc k=3", "'k=3' is not a JSON object: write options as in '{\"on_miss\":\"wait\"}'"),
    ],
)
def test_values_of_the_wrong_kind(tune, capsys, words, said):
    with pytest.raises(SystemExit):
        tune(*words.split())
    usage, sentence = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ") and sentence.endswith(said)


@pytest.mark.parametrize("words, as_text", [("", True), ("--chat-template a.jinja", False)])
def test_the_plan_is_said_first(tune, tmp_path, monkeypatch, capsys, words, as_text):
    """What is tried, for how long, and where results go. The target has no chat template."""

    def measure(*_):
        assert "[1 of at most 7] plain vLLM" in (said := capsys.readouterr().err)
        assert "Plain vLLM and up to 6 candidates" in said and "\n  draft    draft\n" in said
        assert "k        2, 3, 5, 7, 10\n" in said and "f        1, 3\n" in said
        assert "1, 8, with 8 requests each and answers of up to 256 tokens" in said
        assert "Each takes 11 minutes at most, all of them 1.3 hours at most." in said
        assert "Results and logs: ssd-tune/" in said
        assert ("sent as plain text because the target has no chat template" in said) is as_text
        raise Failed("enough")

    monkeypatch.setattr(Measurer, "measure", measure)
    assert tune(*"--draft draft --f 1,3 --limit 600".split(), *words.split()) == 1
    (setting,) = tmp_path.glob("ssd-tune/*/setting.json")
    assert ("messages[0].content" in setting.read_text()) is as_text
