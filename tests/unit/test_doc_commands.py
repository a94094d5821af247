"""Every command of README, docs and examples is one that its program's own parser takes."""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator

import pytest
from vllm.entrypoints.cli.main import main as vllm

from tests.support.pages import BLOCKS, PAGES, ROOT, Block, text_of
from vllm_ssd.cli import main as vllm_ssd

# Programs of others, and of the shell.
OTHERS = set("cd docker export git hf kubectl pip ray scp source".split())
FILES = r"(?:-f|\s)\s*((?:docker|tests|examples|docs)/[\w./-]+)"  # in this repository


def commands(block: Block) -> Iterator[list[str]]:
    """Words of each command, without variables before it and comments."""
    lines = re.sub(r"\\\n\s*", " ", block.code).splitlines()
    for line in lines:
        if re.match(r"[\w./-]+", line) and "──" not in line:
            words = shlex.split(line, comments=True)
            while "=" in words[0]:
                words.pop(0)
            yield words


FOUND = [
    pytest.param(words, id=f"{block} {' '.join(words)}")
    for block in BLOCKS
    if "import" not in block.code
    for words in commands(block)
]
FOUND += [["make", rule] for page in PAGES for rule in re.findall("`make ([\\w-]+)", text_of(page))]


class Parsed(Exception):
    """The arguments are understood; nothing is run."""


@pytest.fixture(autouse=True)
def only_parse(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # a parser opens the file of --report
    for name in ("parse_args", "parse_known_args"):
        parse = getattr(argparse.ArgumentParser, name)

        def parse_and_stop(parser, args=None, namespace=None, parse=parse):
            parse(parser, args, namespace)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse_and_stop)


@pytest.mark.parametrize("words", FOUND)
def test_it_is_understood(words, monkeypatch):
    words = ["2" if word == "N" else word for word in words]
    program, *rest = words
    for path in re.findall(FILES, " ".join(words)):
        assert (ROOT / path).exists(), path
    if program.endswith(("python", "python3")) and rest[0] == "-m" and rest[1] != "pytest":
        monkeypatch.setattr(sys, "argv", rest[1:])
        with pytest.raises(Parsed):
            runpy.run_module(rest[1], run_name="__main__")
    elif program in ("vllm", "vllm-ssd"):
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(Parsed):
            vllm() if program == "vllm" else vllm_ssd()
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
    else:
        assert program in OTHERS or (ROOT / program).exists() or rest[1] == "pytest", program
