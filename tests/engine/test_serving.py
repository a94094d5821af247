"""The served benchmark with the real client of sglang, beside the benchmark's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.serving.clients.sglang import PYTHON
from benchmarks.serving.records import Saved
from tests.support.harness import ONE_PROCESS

ROOT = Path(__file__).parents[2]
TOKENS = 24


@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-bench: run `make bench-clients`")
def test_quick_with_sglangs_client(spoken_pair, tmp_path):
    saved = tmp_path / "serving.json"
    command = [sys.executable, "-m", "benchmarks.serving", "concurrency", "--quick"]
    command += ["--client", "sglang,own", "--sides", "ssd", "--concurrency", "2"]
    command += ["--tokens", str(TOKENS), "--requests", "6"]
    command += ["--target", spoken_pair[0], "--draft", spoken_pair[1]]
    command += ["--logs", str(tmp_path), "--json", str(saved)]
    command += ["--engine-option", f'distributed_executor_backend="{ONE_PROCESS}"']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    (result,) = msgspec.json.decode(saved.read_bytes(), type=Saved).results
    assert [run.client for run in result.runs] == ["sglang", "own"]
    for run in result.runs:
        seen, counted = run.seen, run.speculation
        assert (seen.completed, seen.tokens) == (6, 6 * TOKENS), run
        assert 0 < seen.ttft.p50 < seen.e2e.p50 < 1000 * seen.seconds, run
        # Several tokens come in one message, so that more time passes between two messages.
        assert counted.tokens_per_round > 1.5 and seen.itl.mean > 1.3 * seen.tpot.mean, run
        assert abs(counted.hit + counted.miss + counted.late - 1) < 1e-9, run
    assert "tokens a round" in done.stdout and "ssd k=3 f=1" in done.stdout
