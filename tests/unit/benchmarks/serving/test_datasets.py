"""Where questions come from, and what prompts are made of them."""

import json

import pytest

from benchmarks.common.prompts import ANSWER, chat_text
from benchmarks.serving.datasets import Dataset, find_dataset
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.records import Load


def test_a_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = '{"text": "one\u2028line"}\n{"prompt": "two"}\n{"question": "three", "answer": "3"}\n'
    path.write_text(lines, encoding="utf-8")
    found = find_dataset(str(path), 1)
    assert (found.name, found.chats) == ("mine", [["one\u2028line"], ["two"], ["three"]])
    assert "3 questions" in found.about


@pytest.mark.parametrize("line", ["{", " ", "[]", '{"a": "2"}', '{"text": 2}', '{"turns": []}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(ValueError, match='line 2, has no "text", "prompt"'):
        find_dataset(str(path), 1)


@pytest.mark.parametrize(
    "turns, chats", [(1, ["a", "c", "d", "e"]), (2, ["ab", "cd"]), (3, ["abc"]), (5, ["abcde"])]
)
def test_a_chat_has_the_turns_of_its_line_and_then_further_ones(
    tmp_path, monkeypatch, turns, chats
):
    file = tmp_path / "eagle" / "qa" / "question.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(json.dumps({"turns": list(line)}) for line in ("ab", "c", "d", "e")))
    monkeypatch.setenv("SSD_DATASET_DIR", str(tmp_path))
    found = find_dataset("eagle/qa", turns)
    assert (found.name, found.chats) == ("eagle/qa", [list(chat) for chat in chats])
    with pytest.raises(ValueError, match="has fewer than 6 questions"):
        find_dataset("eagle/qa", 6)


def test_out_of_the_references_folder(tmp_path, monkeypatch):
    file = tmp_path / "c4" / "c4_data_10000.jsonl"
    file.parent.mkdir()
    file.write_text('{"text": "one"}\n')
    monkeypatch.setenv("SSD_DATASET_DIR", str(tmp_path))
    found = find_dataset("c4", 1)
    assert (found.name, found.chats) == ("c4", [["one"]]) and str(file) in found.about
    with pytest.raises(ValueError, match="no data set 'alpaca'"):
        find_dataset("alpaca", 1)


class Tokenizer:
    """A token for each letter, and a chat template of two letters."""

    chat_template = "<>"

    def encode(self, text, add_special_tokens=True):
        return list(text)

    def decode(self, tokens):
        return "".join(tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert [message["role"] for message in messages[:2]] in (["user"], ["user", "assistant"])
        return "".join(f"<{message['content']}>" for message in messages)


def prompts(questions, longest=100):
    return Prompts(Tokenizer(), {"d": Dataset("d", [[q] for q in questions], "")}, longest)


def test_a_chat_has_a_mark_for_every_answer_but_the_last():
    assert chat_text(Tokenizer(), "a", "b", "c") == f"<a><{ANSWER}><b><{ANSWER}><c>"
    assert chat_text(object(), "a", "b") == f"a{ANSWER}\n\nb", "without a template"


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
    chats = prompts(["question " * 9]).take(Load("d", 2, 9, prompt_tokens=200, turns=2), 0)
    assert len({turn for chat in chats for turn in chat.split(ANSWER)}) == 4
