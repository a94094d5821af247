"""`vllm-ssd check`, as users run it: a pair that fits, and one thing wrong each."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.model_folders import write_model
from tests.support.starts import ROOT


@pytest.fixture(scope="module")
def checks(target, draft, tmp_path_factory):
    """What each says, and its exit status."""

    def check(*words: str) -> tuple[str, int]:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_ssd.cli", "check", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        return done.stdout, done.returncode

    other = write_model(tmp_path_factory.mktemp("other"))
    with ThreadPoolExecutor(2) as pool:
        yield {
            "right": pool.submit(check, target, "--draft", draft),
            "vocabulary": pool.submit(check, target, "--draft", other),
        }


def test_a_pair_that_fits(checks):
    said, status = checks["right"].result()
    assert status == 0, said
    lines = [line.split() for line in said.splitlines() if line]
    # These stand-ins are nearly of one size.
    others = [line for line in lines[:-1] if line[0] not in ("ok", "->")]
    assert [line[:3] for line in others] == [["note", "draft's", "size"]], said
    assert said.splitlines()[-1] == "ssd can start, 1 to note"
    for words in ("49152 tokens", "sdpa: right in the self-test", "GiB of weights", "MiB"):
        assert words in said


def test_a_draft_with_another_vocabulary(checks):
    said, status = checks["vocabulary"].result()
    assert status == 1 and "different vocabularies" in said and "-> name another with" in said, said
