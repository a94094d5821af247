"""Prompts of users, in the forms that they may have; commands that are refused; what is said."""

import pytest
from vllm.renderers import hf

from tests.support.sentences import refused
from vllm_ssd import cli
from vllm_ssd.tools.tune import command
from vllm_ssd.tools.tune.command import read_prompts


@pytest.fixture
def tune(models, tmp_path, monkeypatch):
    """Calls the command for a target, in a folder that has drafts, too; its exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # else vLLM wants most of the memory
    for name, folder in vars(models).items():
        (tmp_path / name).symlink_to(folder)
    engine = ["--dtype", "float32", "--enforce-eager"]
    return lambda *words: cli.main(["tune", "target", *words, *engine])


AS_JSON = "as one JSON object, --speculative-config '{...}'"
NONE, UNREADABLE, BOTH = "there are none", "cannot be read as prompts", ["One?", "Two?"]


@pytest.mark.parametrize(
    "name, text, found",
    [
        ("a.txt", "One?\n\nTwo?\n", BOTH),
        ("a.jsonl", '{"prompt": "One?"}\n{"prompt": "Two?", "id": 2}\n', BOTH),
        ("a.txt", "\n \n", NONE),
        ("a.jsonl", '{"prompt": ["a"]}', NONE),
        ("a.jsonl", "What?", UNREADABLE),
        ("a.jsonl", '{"prompt": "a"}\n{"question": "b"}', UNREADABLE),
        ("a.txt", None, UNREADABLE),
    ],
)
def test_prompts_of_a_file(tmp_path, name, text, found):
    if text is not None:
        (tmp_path / name).write_text(text)
    if found is BOTH:
        assert read_prompts(tmp_path / name) == found
        return
    with refused(found):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--draft draft --k 17", "k must be a whole number from 1 to 16, not 17"),
        ("--draft draft --k 0,3", "--k 0 is too low: write 1 or more"),
        ("--draft draft --requests 0", "--requests 0 is too low: write 1 or more"),
        ("--draft draft --limit=-5", "--limit -5 is too low: write 1 or more"),
        ("--draft draft --prompts /nowhere/a.txt", "/nowhere/a.txt cannot be read"),
        ("--draft draft --draft other", "different vocabularies"),
        ('--draft draft -sc {"on_mis":1}', "did you mean 'on_miss'?"),
        ("--draft draft --speculative-config.on_miss wait", AS_JSON),
        ('--draft draft --speculative_config {"method":"ssd"}', AS_JSON),
        ("--spec-model draft --draft draft", "--spec-model would also change plain vLLM"),
        ("draft", "'draft' is a second target: name a draft with --draft"),
        ("--draft draft --temperature 3", "--temperature 3 is no temperature: write 0 to 2"),
        ("--draft draft --temperature nan", "--temperature nan is no temperature"),
        ('--draft draft -sc {"k":3}', "--speculative-config has 'k', of which tune tries several"),
        ("--draft draft --results target/config.json", "name another folder"),
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
        ("--limit nan", "argument --limit: invalid int value: 'nan'"),
        ("-sc [1]", "'[1]' is not a JSON object: write options as in '{\"on_miss\":\"wait\"}'"),
        ("-sc k=3", "'k=3' is not a JSON object: write options as in '{\"on_miss\":\"wait\"}'"),
    ],
)
def test_values_of_the_wrong_kind(tune, capsys, words, said):
    with pytest.raises(SystemExit):
        tune(*words.split())
    usage, sentence = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ") and sentence.endswith(said)


TEMPLATE = "{{ messages }}"


@pytest.mark.parametrize(
    "words, of_processor, as_text",
    [("", None, True), ("--chat-template a.jinja", None, False), ("", TEMPLATE, False)],
)
def test_it_says_first_what_it_will_do(
    tune, tmp_path, monkeypatch, capsys, words, of_processor, as_text
):
    """What is tried, for how long, and where results go. The target's tokenizer has no chat
    template. of_processor: that of a model for images, which its processor may have."""
    monkeypatch.setattr(command, "measure", lambda *_: {})
    monkeypatch.setattr(hf, "_try_get_processor_chat_template", lambda *_, **__: of_processor)
    assert tune(*"--draft draft --f 1,3 --limit 600".split(), *words.split()) == 1
    said = capsys.readouterr().err
    assert "Plain vLLM and up to 6 candidates are measured, in at most 600 s each" in said
    assert "drafts draft; k [2, 3, 5, 7, 15]; f [1, 3]; 12 prompts" in said
    assert "Results and logs: ssd-tune/" in said and "[1 of at most 7] plain vLLM" in said
    assert ("plain text because the target has no chat template" in said) is as_text
    (setting,) = tmp_path.glob("ssd-tune/*/setting.json")
    assert ("messages[0].content" in setting.read_text()) is as_text


def test_no_more_are_measured_than_is_asked_for(tune, monkeypatch, capsys):
    measured = []

    def measure(candidate, *_):
        measured.append(candidate)
        return {1: {"output_throughput": 1.0, "mean_tpot_ms": 2.0}}

    monkeypatch.setattr(command, "measure", measure)
    assert tune(*"--draft draft --at-most 3".split()) == 0
    assert [(each.k, each.f) for each in measured] == [(0, 0), (7, 3), (5, 3), (3, 3)]
    assert "Leave ssd off: draft k=7 f=3, the best, is 1.00 times" in capsys.readouterr().out
