"""What of the images can be checked without building them."""

import re

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.wheel import ROOT, SOURCES
from vllm_ssd.config.versions import SUPPORTED_ON_GPUS


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_dockerfile_has_a_supported_vllm_and_copies_what_it_needs(name):
    text = (ROOT / "docker" / f"Dockerfile.{name}").read_text()
    (tag,) = re.findall(r"^ARG VLLM_(?:ROCM_)?TAG=v([\d.]+)", text, re.M)
    assert SpecifierSet(SUPPORTED_ON_GPUS).contains(tag)
    copied = {source for line in re.findall("^COPY (.*) ", text, re.M) for source in line.split()}
    needed = {*SOURCES, "vllm_ssd", "benchmarks", "examples", "tests"}
    needed |= {"docker"} if "docker/setup_rocm.sh" in text else set()
    assert needed <= copied and all((ROOT / source).exists() for source in copied)
