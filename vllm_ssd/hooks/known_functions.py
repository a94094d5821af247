"""Finds replaced functions of vLLM whose source differs from that of the vLLM ssd was made for.

``patches.py`` refuses a function that is missing or has other parameters. A function with a changed
body may still work, so ``vllm-ssd check`` names it. This module reads vLLM's files, and does not
import them.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from vllm_ssd.hooks.patches import PATCHES, Patch

# Hashes of the functions' sources in vLLM 0.32.0 and 0.33.0. To print those of another version:
# python -m vllm_ssd.hooks.known_functions FOLDER, where FOLDER contains its folder "vllm".
KNOWN = frozenset(
    """
    08d5e05dd9 11e1427fd3 2327895e2e 365376826d 433f4a16e1 49c9314d0d 4d80667887 5a3d99fbe2
    5d9ffa4af0 680c5dd2e6 6b57f80326 6cd34dc3f3 74526c5bff 78b71ca425 81a9810fc3 8929a86b65
    a67739c954 a71e828ecb ae8d8c5c68 ae97ab28a0 b3f074427d b9149e8c6c ba33005b9d bcc9725427
    be489cd675 c02b66441e c095504e71 d640a73741 de1ccfdc7e e53613c469 e54e5c6e0b eb19d6a537
    fd0c5e084a
    """.split()
)


def changed_functions() -> list[str]:
    """Return the functions that differ from both 0.32.0's and 0.33.0's, as "module.function"."""
    return [
        patch.function.replace(":", ".")
        for patch, fingerprint in _fingerprints(None)
        if fingerprint not in KNOWN
    ]


def _fingerprints(folder: Path | None) -> Iterator[tuple[Patch, str]]:
    """Yield the hash of each function of vLLM that is replaced where it is defined; "" if its file
    is missing. folder: contains vLLM; None: the installed vLLM."""
    for patch in PATCHES:
        if not patch.module.startswith("vllm."):
            continue
        try:
            source = _file(patch.module, folder).read_text(encoding="utf-8")
        except OSError:
            yield patch, ""
            continue
        node: ast.AST | None = ast.parse(source)
        for name in patch.name.split("."):
            node = next((n for n in getattr(node, "body", ()) if _defines(n, name)), None)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        text = "" if node is None else ast.get_source_segment(source, node)
        yield patch, blake2b((text or "").encode(), digest_size=5).hexdigest()


def _defines(node: ast.AST, name: str) -> bool:
    imported = (alias.asname or alias.name for alias in getattr(node, "names", ()))
    return getattr(node, "name", None) == name or name in imported


def _file(module: str, folder: Path | None) -> Path:
    if folder is None:
        package = importlib.util.find_spec("vllm")
        folder = Path(package.origin or "").parents[1] if package else Path()
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


if __name__ == "__main__":
    print(*sorted({fingerprint for _, fingerprint in _fingerprints(Path(sys.argv[1]))}), sep="\n")
