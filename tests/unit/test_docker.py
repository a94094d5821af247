"""What of the images can be checked without building them, and the script that the one for AMD GPUs
shares with bare machines."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.wheel import ROOT, SOURCES
from vllm_ssd.config.versions import SUPPORTED_ON_GPUS

SCRIPT = ROOT / "docker" / "setup_rocm.sh"
FROM_SOURCE = "git+https://github.com/ROCm/flashinfer@v0.5.3+amd.2"
WITHOUT = "*flashinfer*"


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_dockerfile_has_a_supported_vllm_and_copies_what_it_needs(name):
    text = (ROOT / "docker" / f"Dockerfile.{name}").read_text()
    (tag,) = re.findall(r"^ARG VLLM_(?:ROCM_)?TAG=v([\d.]+)", text, re.M)
    assert SpecifierSet(SUPPORTED_ON_GPUS).contains(tag)
    copied = {source for line in re.findall("^COPY (.*) ", text, re.M) for source in line.split()}
    needed = {*SOURCES, "vllm_ssd", "benchmarks", "examples", "tests"}
    needed |= {"docker"} if "docker/setup_rocm.sh" in text else set()
    assert needed <= copied and all((ROOT / source).exists() for source in copied)


@pytest.fixture
def set_up(tmp_path):
    """Runs the script with a Python that does as this script of sh says; what it printed, and the
    arguments of each call of Python."""

    def set_up(body: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        python, calls = tmp_path / "python", tmp_path / "calls"
        python.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{body}\n')
        python.chmod(0o755)
        environment = {**os.environ, "PYTHON": str(python), **environment}
        done = subprocess.run(SCRIPT, env=environment, capture_output=True, text=True)
        return done, calls.read_text().splitlines()

    return set_up


@pytest.mark.parametrize(
    "hip, fails, last",
    [
        ("7.2.53211", "-", "amd-flashinfer==0.5.3+amd.2"),
        ("10.0.60311", "-", "amd-flashinfer==0.6.18+amd.2"),
        ("7.2.53211", "*--index-url*", FROM_SOURCE),
        ("7.2.53211", WITHOUT, FROM_SOURCE),
    ],
)
def test_steps_of_the_script(set_up, hip, fails, last):
    """Every installation is bound to what is there, or brings nothing but itself. Where the wheel
    of FlashInfer cannot be had, it is built; where that fails, too, one line says what is used."""
    done, calls = set_up(f'case "$*" in -) echo INFO; echo {hip} ;; {fails}) exit 1 ;; esac')
    assert done.returncode == 0, done.stderr
    first, *installs = [call for call in calls if "pip install" in call]
    assert first.endswith("-e .[rocm,dev]") and installs[-1].endswith(last)
    assert all(" -c " in call or " --no-deps " in call for call in (first, *installs))
    assert ("Triton" in done.stdout) == (fails == WITHOUT)
    assert calls[-1] == "-m vllm_ssd.cli check", "last, as its exit status is the script's"
