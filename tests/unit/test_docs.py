"""What README and docs tell to type: every command is run by a test, or needs more than a test has;
options and flags exist, with the defaults that are told."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
from markdown_it import MarkdownIt

from tests.support.pages import EXAMPLES, PAGES, ROOT, check_test_exists, text_of
from vllm_ssd.config.default_drafts import FAMILIES
from vllm_ssd.config.options import OPTIONS
from vllm_ssd.config.ssd_config import DEFAULT_TOP_M, SSDConfig
from vllm_ssd.tools import stats
from vllm_ssd.tools.check import command as check
from vllm_ssd.tools.draft_server import command as draft
from vllm_ssd.tools.tune import command as tune

# Commands of these pages are for machines and models that no test has, or they are diagrams.
FOR_OTHER_MACHINES = {
    "docs/dev/architecture.md",
    "docs/dev/benchmarks.md",
    "docs/rocm.md",
    *EXAMPLES,
}
COMMANDS = tomllib.loads((ROOT / "tests/support/documented_commands.toml").read_text())["blocks"]
# Options whose default depends on the machine or the models: how the page begins to say it.
_BY_MACHINE = {
    "model": "by family",
    "k": "15 on GPU, 7 on CPU",
    "f": "2 on GPU, 3 on CPU",
    "draft_device": "one the target does not use",
    "max_wait_ms": "2000 on CPU, 100 on GPU",
    "draft_dtype": "the target's",
    "enable_adaptive_verification": "wherever vLLM can",
    "draft_load_config": "the target's",
    "max_model_len": "the shorter of both",
    "draft_kv_cache_gib": "1 on CPU",
    "draft_max_num_batched_tokens": "64 on CPU, 512 on GPU",
}


@dataclass(frozen=True)
class Block:
    """Commands of a page (a fence of "text" is what they print)."""

    page: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


BLOCKS = [
    Block(page, token.map[0] + 1, token.content)
    for page in PAGES
    for token in MarkdownIt().parse(text_of(page))
    if token.type in ("code_block", "fence") and token.info != "text"
]
CHECKED_BLOCKS = [block for block in BLOCKS if block.page not in FOR_OTHER_MACHINES]


@pytest.mark.parametrize("block", CHECKED_BLOCKS, ids=str)
def test_commands_are_run_by_a_test_or_need_more(block):
    known = [each for each in COMMANDS if block.code.startswith(each["begins"])]
    assert known, f"{block} is not in documented_commands.toml"
    for each in known:
        assert each["tests"] or each["needs"]
        for test in each["tests"]:
            check_test_exists(f"tests/{test}")


def test_no_commands_are_listed_that_no_page_has():
    for each in COMMANDS:
        assert any(block.code.startswith(each["begins"]) for block in CHECKED_BLOCKS), each


@cache
def flags_of(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for each in (stats, check, tune, draft):
        each.add_command(commands)
    return set(commands.choices[command]._option_string_actions)


def test_flags_in_the_text_exist():
    """In the tables of ``vllm-ssd tune``, and beside the name of a command."""
    table = re.search(r"\n\| option \| default.*?\n\n", text_of("docs/tuning.md"), re.S)
    flags = {name for row in re.findall(r"^\| (`-.*?) \|", table[0], re.M) for name in named(row)}
    assert flags and flags <= flags_of("tune")
    for page in PAGES:
        for command, flag in re.findall(r"`vllm-ssd (\w+) (--[\w-]+)", text_of(page)):
            assert flag in flags_of(command), f"{page}: {flag}"


def named(cell: str) -> list[str]:
    return re.findall(r"`(--?[\w-]+)", cell)


def test_make_has_the_targets_that_are_named():
    said = "\n".join(text_of(page) for page in PAGES)
    targets = set(re.findall(r"^    make ([\w-]+)|`make ([\w-]+)", said, re.M))
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets and {one or other for one, other in targets} <= rules


def configs() -> Iterator[dict]:
    for page in PAGES:
        for config in re.findall(r"--speculative-config '(\{.*?\})'", text_of(page)):
            yield json.loads(config)


def test_every_speculative_config_in_the_docs_is_valid():
    found = list(configs())
    assert found
    for config in found:
        assert config.pop("method") == "ssd"
        assert set(config) <= set(OPTIONS)


@pytest.mark.parametrize("page", PAGES)
def test_options_in_the_text_exist(page):
    """As in `"on_miss":"wait"`."""
    for name in re.findall(r'`"(\w+)" ?: ?[^`]+`', text_of(page)):
        assert name in OPTIONS or name in ("vllm_xargs", "temperature"), f"{page}: {name}"


def documented() -> dict[str, str]:
    """The options of docs/options.md, with what it says of the default."""
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", text_of("docs/options.md"), re.M)
    return {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}


def test_all_options_are_documented_and_no_others():
    assert set(documented()) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_documented_defaults_are_those_of_the_config(name):
    said = documented()[name].replace("`", "")
    if name in _BY_MACHINE:
        assert said.startswith(_BY_MACHINE[name])
        return
    default = DEFAULT_TOP_M if name == "draft_top_m" else getattr(SSDConfig(), name)
    shown = "none" if default is None else str(default).removesuffix(".0")
    assert said == shown.lower()


def test_default_drafts_are_those_of_the_code():
    rows = re.findall(r"^\| ([\w. -]+) \| `([\w./-]+)` \|$", text_of("docs/installation.md"), re.M)
    assert [(target.removesuffix(".x"), name) for target, name in rows] == [
        (family.name, family.draft) for family in FAMILIES
    ]
