"""What README and docs say: links lead somewhere, figures stand in the results that are linked,
tables are those of the lists, sentences those of the code, and paragraphs are short."""

from __future__ import annotations

import re

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import vllm_ssd
from tests.support import compatibility
from tests.support.pages import (
    DOCS,
    PAGES,
    ROOT,
    check_test_exists,
    paragraphs,
    said_in_the_code,
    text_of,
)
from tests.upstream.listed import FILES
from vllm_ssd.config.versions import SUPPORTED, SUPPORTED_ON_GPUS

# Quotes others' figures, too, and makes means.
WORDS = 14000  # of all pages of docs/
OF_MANY_SOURCES = {"docs/dev/benchmarks.md"}


def test_versions_are_those_of_the_code():
    (row,) = re.findall(r"^\| \d.*$", text_of("docs/compatibility.md"), re.M)
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[1:3] == [vllm_ssd.__version__, f"`{SUPPORTED_ON_GPUS}`"]
    assert cells[3].startswith(f"`{SUPPORTED}`")
    assert f"## {vllm_ssd.__version__}" in text_of("CHANGELOG.md")
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == vllm_ssd.__version__
    assert f"badge/version-{vllm_ssd.__version__}-" in text_of("README.md")
    (vllm,) = re.findall(r"badge/vLLM-([\d.]+)-", text_of("README.md"))
    assert SpecifierSet(SUPPORTED_ON_GPUS).contains(f"{vllm}.0")


def test_templates_of_issues_have_fields():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir():
        template = yaml.safe_load(path.read_text())
        assert template["name"] and template["description"]
        assert all(field["id"] and field["attributes"]["label"] for field in template["body"])


def test_pages_are_short():
    """The README fits a screen or two, and all of docs/ an hour."""
    assert len(text_of("README.md").split()) <= 700
    assert sum(len(text_of(page).split()) for page in DOCS) <= WORDS


def test_the_tables_of_compatibility_are_those_of_the_list():
    assert text_of("docs/compatibility.md").endswith("\n".join(compatibility.tables()) + "\n")


@pytest.mark.parametrize("test", sorted(set(compatibility.named_tests())))
def test_what_compatibility_names_exists(test):
    check_test_exists(test)


def test_what_is_refused_is_said_in_the_code():
    said = said_in_the_code()
    for part in compatibility.refusals():
        assert any(part in text for text in said), part


def test_symptoms_are_said_in_the_code():
    """What the page quotes of sentences: its parts between what depends on the machine."""
    said = said_in_the_code()
    rows = re.findall(r"^\| (.*?) \|", text_of("docs/troubleshooting.md"), re.M)
    quoted = [code for cell in rows for code in re.findall(r"`([^`]+)`", cell) if " " in code]
    assert quoted
    for part in (p for code in quoted for p in re.split(r"\.\.\.|N of N|\b\d+\b", code)):
        assert any(part.strip(" :") in text for text in said), part


def test_the_page_of_vllms_tests_has_the_files_of_the_list():
    rows = re.findall(r"^\| `([\w/]+\.py)` \|", text_of("docs/dev/upstream-tests.md"), re.M)
    assert rows == list(FILES)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    for path in re.findall(r"`(?:tests/)?((?:engine|gpu|unit|support)/[\w/]+\.py)`", text_of(page)):
        assert (ROOT / "tests" / path).exists(), path
    folders = "|".join(each.name for each in (ROOT / "vllm_ssd").iterdir() if each.is_dir())
    for path in re.findall(rf"(?<![\w/])((?:{folders})/[\w/]+\.py)", text_of(page)):
        assert (ROOT / "vllm_ssd" / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", text_of(page)):
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


FIGURE = re.compile(r"(?<![\w.`<>=/-])\d*\.\d+(?![\w.-])")


@pytest.mark.parametrize("page", sorted({"README.md", *DOCS} - OF_MANY_SOURCES))
def test_figures_stand_in_the_results_that_are_linked(page):
    """Every number with a point where results are linked; and no gain is told without a source."""
    for part in paragraphs(page):
        linked = re.findall(r"benchmarks/results/([\w-]+\.md)", part)
        figures = {float(figure) for figure in FIGURE.findall(re.sub(r"\]\([^)]*\)", "", part))}
        texts = [(ROOT / "benchmarks/results" / name).read_text() for name in linked]
        known = {float(figure) for text in texts for figure in FIGURE.findall(text)}
        assert not linked or figures <= known, (part, figures - known)
        gain = re.search(r"\d\.\d+ (times|x) ", part)
        assert linked or not gain or "https://" in part, f"{page} names no source: {part}"
