"""Where questions come from, and what prompts are made of them."""

import pytest

from benchmarks.common.prompts import ANSWER
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
