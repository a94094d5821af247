"""What of the images can be checked without building them, and the script that the one for AMD GPUs
shares with bare machines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

from vllm_ssd.config.versions import SUPPORTED_ON_GPUS

ROOT = Path(__file__).parents[2]
CUDA, ROCM = ROOT / "docker" / "Dockerfile.cuda", ROOT / "docker" / "Dockerfile.rocm"
SCRIPT = ROOT / "docker" / "setup_rocm.sh"
BOTH = pytest.mark.parametrize("dockerfile", [CUDA, ROCM], ids=["cuda", "rocm"])


def copied(path: Path) -> list[list[str]]:
    """Sources and target of each COPY of a Dockerfile, continued lines joined."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    return [line.split()[1:] for line in lines if line.startswith("COPY ")]


@BOTH
def test_the_base_is_a_vllm_that_is_supported_on_gpus(dockerfile):
    (tag,) = re.findall(r"^ARG VLLM_(?:ROCM_)?TAG=v([\d.]+)", dockerfile.read_text(), re.M)
    assert SpecifierSet(SUPPORTED_ON_GPUS).contains(tag)


@BOTH
def test_what_is_copied_is_there_and_enough(dockerfile, tmp_path):
    """The package can be set up from it, and it has the tests and the benchmarks."""
    for *sources, target in copied(dockerfile):
        for source in sources:
            place = tmp_path / target / (source if target.endswith("/") else "")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)
    said = subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=tmp_path, capture_output=True, text=True
    )
    assert said.stdout.split()[-1:] == ["vllm-ssd"], said.stderr
    scripts = re.findall(r"docker/\w+\.sh", dockerfile.read_text())
    for part in ("tests/gpu/test_kernels.py", "benchmarks/serving/__main__.py", *scripts):
        assert (tmp_path / part).exists()


@pytest.fixture
def set_up(tmp_path):
    """Runs the script with a Python that does as this script of sh says; what it printed, and the
    arguments of each call of Python."""

    def set_up(body: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        python, calls = tmp_path / "python", tmp_path / "calls"
        python.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{body}\n')
        python.chmod(0o755)
        environment = {**os.environ, "PYTHON": str(python), **environment}
        done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True)
        return done, calls.read_text().splitlines()

    return set_up


FOR_ROCM_7, FOR_ROCM_10 = "amd-flashinfer==0.5.3+amd.2", "amd-flashinfer==0.6.18+amd.2"
FROM_SOURCE = "git+https://github.com/ROCm/flashinfer@v0.5.3+amd.2"
WITHOUT = "*flashinfer*"


@pytest.mark.parametrize(
    "hip, chosen, fails, last",
    [
        ("7.2.53211", {}, "-", FOR_ROCM_7),
        ("7.2.53211", {"AMD_FLASHINFER": "auto"}, "-", FOR_ROCM_7),
        ("10.0.60311", {"AMD_FLASHINFER": "auto"}, "-", FOR_ROCM_10),
        ("7.2.53211", {"AMD_FLASHINFER": ""}, "-", None),
        ("7.2.53211", {"AMD_FLASHINFER": FOR_ROCM_10}, "-", FOR_ROCM_10),
        ("7.2.53211", {}, "*--index-url*", FROM_SOURCE),
        ("7.2.53211", {}, WITHOUT, FROM_SOURCE),
    ],
)
def test_steps_of_the_script(set_up, hip, chosen, fails, last):
    """Every installation is bound to what is there, or brings nothing but itself. FlashInfer is the
    one for the ROCm that is there, or the one that was asked for. Where its wheel cannot be had, it
    is built; where that fails, too, one line says what is used, and all else is done."""
    done, calls = set_up(
        f'case "$*" in -) echo INFO; echo {hip} ;; {fails}) exit 1 ;; esac', **chosen
    )
    assert done.returncode == 0, done.stderr
    assert calls[0] == "-", "the check comes first"
    assert calls[1].startswith("-m pip list"), "then what is there"
    installs = [call for call in calls if "pip install" in call]
    assert all(" -c " in call or " --no-deps " in call for call in installs)
    assert installs[0].endswith("-e .[rocm,dev]")
    assert [call.split()[-1] for call in installs[1:]][-1:] == ([last] if last else [])
    assert ("Triton" in done.stdout) == (fails == WITHOUT)
    *_, kernels, check = calls
    assert kernels == "-m pytest -q -s tests/gpu/test_kernels.py tests/gpu/test_attention.py"
    assert check == "-m vllm_ssd.cli check", "last, as its exit status is the script's"


@pytest.mark.skipif(torch.version.hip is not None, reason="would set up this very Python")
def test_a_python_without_rocm_is_left_alone(set_up):
    done, calls = set_up(f'exec {sys.executable} "$@"')
    assert done.returncode == 1 and calls == ["-"]
    assert "torch is not for ROCm: install vLLM for ROCm" in done.stderr.splitlines()[-1]
