"""Which modules of the package may import which: no circles, and lower folders know no higher ones.

Every import counts: those for type checking and those in functions, too.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vllm_ssd

PACKAGE = "vllm_ssd"
ROOT = Path(vllm_ssd.__file__).parent

# Folders, and modules that are in none, from the lowest to the highest; those of one height do not
# import each other.
LAYERS = "log table draft service bridge config metrics worker hooks tools plugin|cli".split()
HEIGHTS = {part: height for height, parts in enumerate(LAYERS) for part in parts.split("|")}
# What some parts do without, although it is lower.
ALLOWED = {"metrics": {"log", "table"}}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _named_in(module: str) -> Iterator[str]:
    """Modules of this package that a module imports, maybe itself."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (_module_of(alias.name) for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            if _is_ours(source):
                yield from (_module_of(f"{source}.{alias.name}") for alias in node.names)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == PACKAGE


def _module_of(name: str) -> str:
    """The module itself, or the one that has this name in it."""
    found = name if name in MODULES else name.rpartition(".")[0]
    assert found in MODULES, f"there is no module {name}"
    return found


IMPORTS = {module: set(_named_in(module)) - {module} for module in MODULES}


def part_of(module: str) -> str | None:
    """The folder of a module, or the module itself; None for the package's own, which imports
    nothing."""
    return module.split(".")[1] if "." in module else None


def test_every_part_has_its_place():
    assert {part for module in MODULES if (part := part_of(module))} == set(HEIGHTS)


# Lines of each folder, at most: that one grows is a decision.
CEILINGS = {
    "../benchmarks": 4225,
    "../tests": 19870,
    "table": 2025,
    "draft": 4900,
    "service": 2520,
    "bridge": 1180,
    "config": 1190,
    "metrics": 490,
    "worker": 1850,
    "hooks": 1230,
    "tools": 1650,
}


@pytest.mark.parametrize("part", CEILINGS)
def test_no_folder_grows_by_chance(part):
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / part).rglob("*.py"))
    assert CEILINGS[part] - 100 < lines <= CEILINGS[part], "or lower the ceiling"


def test_the_package_itself_imports_nothing():
    assert not IMPORTS[PACKAGE]


def test_no_modules_import_each_other():
    TopologicalSorter(IMPORTS).prepare()  # which raises a CycleError that names them


@pytest.mark.parametrize("part", HEIGHTS)
def test_only_lower_parts_are_imported(part):
    known = ALLOWED.get(part, {name for name in HEIGHTS if HEIGHTS[name] < HEIGHTS[part]})
    odd = [
        f"{module} imports {imported}"
        for module in MODULES
        if part_of(module) == part
        for imported in sorted(IMPORTS[module])
        if part_of(imported) not in {None, part} | known
    ]
    assert not odd


def test_wrappers_are_those_of_the_table():
    """``patches.py`` imports the wrappers' modules by name, when their turn comes: they may import
    it, and it imports none of them."""
    hooks = {module for module in MODULES if part_of(module) == "hooks"}
    assert not IMPORTS[f"{PACKAGE}.hooks.patches"] & hooks
