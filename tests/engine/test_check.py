"""`vllm-ssd check`, as users run it. tests/unit/tools/check has what it finds wrong."""

import subprocess
import sys

from tests.support.starts import ROOT


def test_a_pair_that_fits(target, draft):
    command = [sys.executable, "-m", "vllm_ssd.cli", "check", target, "--draft", draft]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout
    assert done.returncode == 0, said
    lines = [line.split() for line in said.splitlines() if line]
    # These stand-ins are nearly of one size.
    others = [line for line in lines[:-1] if line[0] not in ("ok", "->")]
    assert [line[:3] for line in others] == [["note", "draft's", "size"]], said
    assert said.splitlines()[-1] == "ssd can start, 1 to note"
    for words in ("49152 tokens", "sdpa: right in the self-test", "GiB of weights", "MiB"):
        assert words in said
