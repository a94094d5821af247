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


def instructions(path: Path) -> list[tuple[str, str]]:
    """Name and arguments of each, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, " ".join(rest.split()))
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


def values(path: Path, kind: str) -> dict[str, str]:
    """Names and values that a Dockerfile's instructions of this kind, ARG or ENV, set."""
    pairs = re.compile(r'(\w+)=("[^"]*"|\S*)')
    found = (pairs.findall(rest) for name, rest in instructions(path) if name == kind)
    return {name: value.strip('"') for all_of_one in found for name, value in all_of_one}


@BOTH
def test_variables_are_declared_before_they_are_used(dockerfile):
    """An ARG before FROM is known to FROM alone."""
    declared: set[str] = set()
    for name, rest in instructions(dockerfile):
        odd = set(re.findall(r"\$\{?(\w+)", rest)) - declared
        assert not odd, f"{name} {rest}"
        if name == "FROM":
            declared.clear()
        if name in ("ARG", "ENV"):
            declared |= set(re.findall(r"(\w+)=", rest))


@pytest.mark.parametrize(
    "dockerfile, image, tag",
    [(CUDA, "vllm-openai", "VLLM_TAG"), (ROCM, "vllm-openai-rocm", "VLLM_ROCM_TAG")],
    ids=["cuda", "rocm"],
)
def test_the_base_is_a_vllm_that_is_supported_on_gpus(dockerfile, image, tag):
    (base,) = (rest for name, rest in instructions(dockerfile) if name == "FROM")
    assert base == f"vllm/{image}:${{{tag}}}"
    version = re.fullmatch(r"(v\d+\.\d+\.\d+)(-rocm\d+)?", values(dockerfile, "ARG")[tag])
    assert version and SpecifierSet(SUPPORTED_ON_GPUS).contains(version[1])


@BOTH
def test_what_is_copied_is_there_and_enough(dockerfile, tmp_path):
    """The package can be set up from it, and it has the tests and the benchmarks."""
    for name, rest in instructions(dockerfile):
        if name != "COPY":
            continue
        *sources, target = rest.split()
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


def test_every_variable_is_explained():
    text = (ROOT / "docs" / "rocm.md").read_text()
    for name, value in values(ROCM, "ENV").items():
        assert f"| `{name}" in text, f"{name} is missing in the table of docs/rocm.md"
        known = "$" in value or f"{name}={value}" in text or f'{name}="{value}"' in text
        assert known, f"docs/rocm.md has another value of {name}"
    for release in re.findall(r"amd-flashinfer==([\w.+]+)", SCRIPT.read_text()):
        assert release in text, f"docs/rocm.md does not name {release}"


def run_script(python: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script with this Python, as it would run where it stands."""
    return subprocess.run(
        [SCRIPT],
        env={**os.environ, "PYTHON": str(python), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def recorder(tmp_path):
    """A Python that finds everything in order, and writes down what it was to do. HIP: the version
    that it says it is for; FAILS: what it fails to do, as a pattern of sh."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$@" >>"$0.calls"\n'
        'eval "case \\"\\$*\\" in ${FAILS:-nothing}) exit 1 ;; -) echo INFO; echo $HIP ;; esac"\n'
    )
    python.chmod(0o755)
    return python


FOR_ROCM_7, FOR_ROCM_10 = "amd-flashinfer==0.5.3+amd.2", "amd-flashinfer==0.6.18+amd.2"


@pytest.mark.parametrize(
    "hip, flashinfer, last",
    [
        ("7.2.53211", None, FOR_ROCM_7),
        ("7.2.53211", "auto", FOR_ROCM_7),
        ("10.0.60311", "auto", FOR_ROCM_10),
        ("7.2.53211", "", None),
        ("7.2.53211", FOR_ROCM_10, FOR_ROCM_10),
    ],
)
def test_steps_of_the_script(recorder, hip, flashinfer, last):
    """Every installation is bound to what is there, or brings nothing but itself. FlashInfer is the
    one for the ROCm that is there, or the one that was asked for."""
    chosen = {} if flashinfer is None else {"AMD_FLASHINFER": flashinfer}
    done = run_script(recorder, HIP=hip, **chosen)
    assert done.returncode == 0, done.stderr
    calls = Path(f"{recorder}.calls").read_text().splitlines()
    assert calls[0] == "-", "the check comes first"
    assert calls[1].startswith("-m pip list"), "then what is there"
    installs = [call for call in calls if "pip install" in call]
    assert all(" -c " in call or " --no-deps " in call for call in installs)
    assert installs[0].endswith("-e .[rocm,dev]")
    assert [call.split()[-1] for call in installs[1:]] == ([last] if last else [])
    *_, kernels, check = calls
    assert kernels == "-m pytest -q -s tests/gpu/test_kernels.py tests/gpu/test_attention.py"
    assert check == "-m vllm_ssd.cli check", "last, as its exit status is the script's"


@pytest.mark.parametrize(
    "hip, source",
    [
        ("7.2.53211", "git+https://github.com/ROCm/flashinfer@v0.5.3+amd.2"),
        ("10.0.60311", "git+https://github.com/AMD-Ecosystem/flashinfer@v0.6.18+amd.2"),
    ],
)
@pytest.mark.parametrize("builds", [True, False])
def test_a_wheel_that_cannot_be_had_does_not_end_the_build(recorder, hip, source, builds):
    """FlashInfer is built from source; where that fails, too, one line says what is used."""
    fails = "*--index-url*" if builds else "*flashinfer*"
    done = run_script(recorder, HIP=hip, FAILS=fails)
    assert done.returncode == 0, done.stderr
    calls = Path(f"{recorder}.calls").read_text().splitlines()
    (built,) = (call for call in calls if "--no-build-isolation" in call)
    assert " --no-deps " in built and built.endswith(source)
    said = [line for line in done.stdout.splitlines() if "Triton" in line]
    assert len(said) == (not builds)
    assert calls[-1] == "-m vllm_ssd.cli check", "everything else is done"


@pytest.mark.skipif(torch.version.hip is not None, reason="would set up this very Python")
def test_a_python_without_rocm_is_left_alone(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>"$0.calls"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = run_script(python)
    assert done.returncode == 1
    assert "torch is not for ROCm: install vLLM for ROCm" in done.stderr.splitlines()[-1]
    assert Path(f"{python}.calls").read_text() == "-\n"
