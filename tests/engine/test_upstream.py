"""A few of vLLM's own tests, in engines with ssd (docs/dev/upstream-tests.md)."""

import subprocess
import sys

import pytest

from tests.engine.conftest import ROOT
from tests.upstream.fetch import fetch_tests


def test_the_most_telling_ones():
    try:
        fetch_tests(ROOT / ".upstream")
    except RuntimeError as error:
        pytest.skip(f"vLLM's tests cannot be had: {error}")
    command = [sys.executable, "-m", "tests.upstream", "--short"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout.decode()[-8000:]
