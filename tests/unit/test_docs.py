"""README and docs say what is: every command is run by a test or marked as needing more than a
test has, options are those of the config, links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from vllm.config.utils import get_field

from tests.upstream.listed import FILES
from tests.upstream.table import reasons
from vllm_ssd.config.options import OPTIONS
from vllm_ssd.config.ssd_config import DEFAULT_TOP_M, SSDConfig

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("deployment", "installation", "options", "operations", "tuning")
    ),
)
PAGES = (*PAGES, "docs/exactness.md", "docs/troubleshooting.md")
_MARK = re.compile(r"<!-- (as it is: tests/\S+::\w+|needs: [^>]+) -->")
_TEST = re.compile(r"(tests/\S+\.py)::(\w+)")
# Options whose default depends on the machine or the models: how the page begins to say it.
_BY_MACHINE = {
    "model": "by family",
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
    """Commands of a page (a fence of "text" is what they print). mark: the comment before them, ""
    if there is none."""

    page: str
    line: int
    code: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        tokens = MarkdownIt().parse((ROOT / page).read_text())
        for before, token in zip([None, *tokens], tokens):
            if token.type in ("code_block", "fence") and token.info != "text":
                mark = before.content.strip() if before and before.type == "html_block" else ""
                found.append(Block(page, token.map[0] + 1, token.content, mark))
    return found


BLOCKS = blocks()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_are_run_by_a_test_or_marked(block):
    assert _MARK.fullmatch(block.mark), f"{block} has no mark before its commands"
    for path, name in _TEST.findall(block.mark):
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{block} names a test that is not in {path}"
    for module in re.findall(r"python -m ((?:examples|benchmarks|vllm_ssd)[\w.]*)", block.code):
        assert importlib.util.find_spec(module), f"{block} runs {module}, which does not exist"


def test_make_has_the_targets_that_are_named():
    named = {name for block in BLOCKS for name in re.findall(r"^make (\w+)", block.code, re.M)}
    rules = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert named and named <= rules


def test_every_speculative_config_in_the_docs_is_valid():
    said = [text for page in PAGES for text in [(ROOT / page).read_text()]]
    configs = re.findall(r"--speculative-config '(\{.*?\})'", "\n".join(said))
    assert configs
    for config in map(json.loads, configs):
        assert config.pop("method") == "ssd"
        assert set(config) <= set(OPTIONS)


def documented() -> dict[str, str]:
    """The options of docs/options.md, with what it says of the default."""
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", (ROOT / "docs/options.md").read_text(), re.M)
    return {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}


def test_all_options_are_documented_and_no_others():
    assert set(documented()) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_documented_defaults_are_those_of_the_config(name):
    said = documented()[name].replace("`", "")
    if name in _BY_MACHINE:
        assert said.startswith(_BY_MACHINE[name])
        return
    field = get_field(SSDConfig, name)
    default = field.default if field.default_factory in (None, _missing()) else None
    default = default.default if hasattr(default, "default") else default
    if name == "tree_backend":
        default = "auto"
    if name == "draft_top_m":
        default = DEFAULT_TOP_M
    shown = "none" if default is None else f"{default:g}" if _is_number(default) else str(default)
    assert said == shown.lower()


def _missing():
    import dataclasses

    return dataclasses.MISSING


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def test_the_page_of_vllms_tests_says_what_the_list_says():
    page = (ROOT / "docs/vllm-spec-tests.md").read_text()
    for file in FILES.values():
        row = rf"\| `{re.escape(file.path)}` \| [^|]+ \| {re.escape(reasons(file))} \|"
        assert re.search(row, page), file.path
    for path in re.findall(r"`((?:engine|gpu|unit)/[\w/]+(?:\.py)?)`", page):
        assert (ROOT / "tests" / path).exists(), path


MORE_PAGES = tuple(f"docs/{name}.md" for name in ("architecture", "security", "vllm-spec-tests"))


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", path):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in {_anchor(heading) for heading in headings}, f"{page}: {target}"


def _anchor(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 100
