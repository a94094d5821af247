"""The pages of the documentation, for the tests that read them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))
EXAMPLES = tuple(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/*/README.md")))
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS, *EXAMPLES)


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text()


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


def paragraphs(page: str) -> Iterator[str]:
    """Without blocks of commands; a table belongs to the paragraph before it, and an item of a list
    is one."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.S)
    text = re.sub(r"\n\n(?=\|)", "\n", re.sub(r"^    .*$", "", text, flags=re.M))
    for part in re.split(r"\n\s*\n|\n(?=\s*[*-] |\s*\d+\. )", text):
        yield part.strip()


def said_in_the_code() -> list[str]:
    """All texts in the package's code."""
    nodes = (
        node
        for path in (ROOT / "vllm_ssd").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
