"""Finds replaced functions of vLLM whose source differs from that of the vLLM ssd was made for.

A start refuses a function that is missing or has other parameters. A function with another body may
still work: read what has changed, and add the new hashes to ``KNOWN``. This module reads vLLM's
files, and does not import them.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from vllm_ssd.hooks.patches import PATCHES, Patch

# Hashes of the functions' sources in vLLM 0.32.0 and 0.33.0. To print those of another version:
# python -m tests.support.known_functions FOLDER, where FOLDER contains its folder "vllm".
KNOWN = frozenset(
    """
    08d5e05dd9 11e1427fd3 2327895e2e 365376826d 433f4a16e1 49c9314d0d 4d80667887 58aa16766a
    5a3d99fbe2 5d9ffa4af0 680c5dd2e6 6b57f80326 6cd34dc3f3 74526c5bff 78b71ca425 81a9810fc3
    8929a86b65 a67739c954 a71e828ecb ae8d8c5c68 ae97ab28a0 b3f074427d b9149e8c6c ba33005b9d
    bcc9725427 be489cd675 c02b66441e c095504e71 d640a73741 de1ccfdc7e e53613c469 e54e5c6e0b
    eb19d6a537 fd0c5e084a fec5aa64aa
    """.split()
)


def installed() -> Path:
    """The folder that contains the installed vLLM."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    return Path(package.origin).parents[1]


def changed_functions(folder: Path) -> list[str]:
    """The functions whose source is that of no known vLLM. folder: contains vLLM."""
    found = fingerprints(folder)
    return [patch.function for patch, fingerprint in found if fingerprint not in KNOWN]


def fingerprints(folder: Path) -> Iterator[tuple[Patch, str]]:
    """Yield the hash of each function of vLLM that is replaced where it is defined; "" if its file
    is missing. folder: contains vLLM."""
    for patch in PATCHES:
        if not patch.module.startswith("vllm."):
            continue
        path = folder.joinpath(*patch.module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        source = path.read_text() if path.exists() else ""
        node: ast.AST | None = ast.parse(source)
        for name in patch.name.split("."):
            node = next((n for n in getattr(node, "body", ()) if _defines(n, name)), None)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        text = "" if node is None else ast.get_source_segment(source, node)
        yield patch, blake2b(text.encode(), digest_size=5).hexdigest() if text else ""


def _defines(node: ast.AST, name: str) -> bool:
    imported = (alias.asname or alias.name for alias in getattr(node, "names", ()))
    return getattr(node, "name", None) == name or name in imported


if __name__ == "__main__":
    print(*sorted({found for _, found in fingerprints(Path(sys.argv[1]))}), sep="\n")
