"""Where questions come from, and what prompts are made of them."""

import pytest

from benchmarks.serving.datasets import Dataset, find_dataset
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.records import Load


def test_a_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "one\u2028line"}\n{"prompt": "two"}\n', encoding="utf-8")
    found = find_dataset(str(path))
    assert (found.name, found.questions) == ("mine", ["one\u2028line", "two"])
    assert "2 questions" in found.about


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "one"}\n{"question": "two"}\n')
    with pytest.raises(ValueError, match="line 2, is not"):
        find_dataset(str(path))
    path.write_text("")
    with pytest.raises(ValueError, match="line 1, is not"):
        find_dataset(str(path))


def test_out_of_the_references_folder(tmp_path, monkeypatch):
    file = tmp_path / "c4" / "c4_data_10000.jsonl"
    file.parent.mkdir()
    file.write_text('{"text": "one"}\n')
    monkeypatch.setenv("SSD_DATASET_DIR", str(tmp_path))
    found = find_dataset("c4")
    assert (found.name, found.questions) == ("c4", ["one"]) and str(file) in found.about
    with pytest.raises(ValueError, match="no data set 'alpaca'"):
        find_dataset("alpaca")


class Tokenizer:
    """A token for each letter, and a chat template of two letters."""

    chat_template = "<>"

    def encode(self, text, add_special_tokens=True):
        return list(text)

    def decode(self, tokens):
        return "".join(tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"<{messages[0]['content']}>"


def prompts(questions, longest=100):
    return Prompts(Tokenizer(), {"d": Dataset("d", questions, "")}, longest)


def test_questions_in_the_chat_template_one_after_the_other():
    found = prompts(["a", "b", "c"])
    assert found.take(Load("d", 2, 9), 0) == ["<a>", "<b>"]
    assert found.take(Load("d", 2, 9), 2) == ["<c>", "<a>"], "from the beginning again"


def test_prompts_that_are_too_long_are_left_out(capsys):
    found = prompts(["aaaaaaa", "b"], longest=5)
    assert found.take(Load("d", 2, 9), 0) == ["<b>", "<b>"]
    assert "left out 1 prompts of more than 5 tokens" in capsys.readouterr().err
    with pytest.raises(ValueError, match="all prompts of d have more than 5 tokens"):
        prompts(["aaaaaaa"], longest=5).take(Load("d", 1, 9), 0)


def test_prompts_of_a_length():
    one, two = prompts(["question " * 9]).take(Load("d", 2, 9, prompt_tokens=200), 0)
    # Two letters more, between text and task.
    assert len(one) == len(two) == 202 and one != two
