"""README and docs agree with the code, and with the results. test_doc_commands.py has commands."""

import json
import re
from collections.abc import Iterator

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from vllm.platforms import current_platform

import vllm_ssd
from tests.support.pages import DOCS, PAGES, ROOT, paragraphs, said_in_the_code, text_of
from vllm_ssd.config.default_drafts import FAMILIES
from vllm_ssd.config.options import OPTIONS
from vllm_ssd.config.ssd_config import DEFAULT_TOP_M, SSDConfig
from vllm_ssd.config.versions import SUPPORTED, SUPPORTED_ON_GPUS

WORDS = 14000  # of all pages of docs/
OF_EACH_PAGE = pytest.mark.parametrize("page", PAGES)
# Quotes others' figures, too, and makes means.
OF_MANY_SOURCES = {"docs/dev/benchmarks.md"}
FIGURE = re.compile(r"(?<![\w.`<>=/-])\d*\.\d+(?![\w.-])")


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


def test_pages_are_short():
    """The README fits a screen or two, and all of docs/ an hour."""
    assert len(text_of("README.md").split()) <= 700
    assert sum(len(text_of(page).split()) for page in DOCS) <= WORDS


@OF_EACH_PAGE
def test_options_exist(page):
    """Those of engines' commands, and of texts such as `"on_miss":"wait"`."""
    for config in re.findall(r"--speculative-config '(\{.*?\})'", text_of(page)):
        assert set(json.loads(config)) <= {"method", *OPTIONS}, config
    for name in re.findall(r'`"(\w+)" ?: ?[^`]+`', text_of(page)):
        assert name in {*OPTIONS, "vllm_xargs", "temperature"}, name


def test_every_option_is_documented_with_its_default():
    """As the default, or as that of this machine. None: other options or models decide."""
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", text_of("docs/options.md"), re.M)
    said = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(said) == set(OPTIONS)
    config = SSDConfig(draft_top_m=DEFAULT_TOP_M)
    defaults = {name: getattr(config, name) for name in OPTIONS} | {"draft_dtype": "the target's"}
    machine = "CPU" if current_platform.is_cpu() else "GPU"
    for name, default in defaults.items():
        shown = str(default).removesuffix(".0").lower()
        told = re.split(", | and ", said[name].replace("`", ""))
        assert default is None or shown in told or f"{shown} on {machine}" in told, name


def test_default_drafts_are_those_of_the_code():
    rows = re.findall(r"^\| ([\w. -]+) \| `([\w./-]+)` \|$", text_of("docs/installation.md"), re.M)
    assert [(target.removesuffix(".x"), name) for target, name in rows] == [
        (family.name, family.draft) for family in FAMILIES
    ]


def quoted() -> Iterator[str]:
    """Refusals of compatibility.md, and the sentences in the tables of troubleshooting.md."""
    yield from re.findall(r'\| refused\b[^|]* \| "(.*)" \|', text_of("docs/compatibility.md"))
    for cell in re.findall(r"^\| (.*?) \|", text_of("docs/troubleshooting.md"), re.M):
        yield from (code for code in re.findall(r"`([^`]+)`", cell) if " " in code)


def test_messages_are_those_of_the_code():
    """The parts between what depends on the machine."""
    said = said_in_the_code()
    parts = [part for text in quoted() for part in re.split(r"\.\.\.|N of N|\b\d+\b|: ", text)]
    assert len(parts) > 50
    for part in parts:
        assert any(part.strip(" :") in text for text in said), part


def test_the_tables_of_compatibility_show_why():
    """What works has a test (its link is checked below), what is refused the sentence."""
    page = text_of("docs/compatibility.md").partition("\n## Parallelism")[2]
    rows = re.findall(r"^\| (?!what|-)(.*?) \| (.*?) \| (.*) \|$", page, re.M)
    assert rows and len(rows) == len({*rows})
    begins = {"works": ("CPU: [", "GPU: [", "unit: ["), "refused": '"', "untested": ""}
    begins["refused by vLLM"] = "unit: ["
    for what, state, why in rows:
        assert why.startswith(begins[state.partition(";")[0]]), what


@OF_EACH_PAGE
def test_links_lead_somewhere(page):
    """To files, to their headings, and to tests by name; files in the text are there, too."""
    for words, target in re.findall(r"\[([^\]]*)\]\(([^)]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", path):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in {_anchor(heading) for heading in headings}, target
        for test in re.findall(r"^`(test_\w+)`$", words):
            assert re.search(rf"^def {test}\(", file.read_text(), re.M), test
    for path in re.findall(r"`(?:tests/)?((?:engine|gpu|unit|support)/[\w/]+\.py)`", text_of(page)):
        assert (ROOT / "tests" / path).exists(), path
    folders = "|".join(each.name for each in (ROOT / "vllm_ssd").iterdir() if each.is_dir())
    for path in re.findall(rf"(?<![\w/])((?:{folders})/[\w/]+\.py)", text_of(page)):
        assert (ROOT / "vllm_ssd" / path).exists(), path


def _anchor(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


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
        assert linked or not gain or "https://" in part, f"no source: {part}"
