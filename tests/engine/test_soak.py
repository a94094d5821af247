"""A short soak of a real server: nothing fails, every greedy text is the plain server's, and
nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.harness import ONE_PROCESS

ROOT = Path(__file__).parents[2]


def test_quick(spoken_pair, tmp_path):
    saved = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--quick", "--json", str(saved)]
    command += ["--target", spoken_pair[0], "--draft", spoken_pair[1], "--logs", str(tmp_path)]
    command += ["--engine-option", f'distributed_executor_backend="{ONE_PROCESS}"']
    command += ["--minutes", "0.25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    summary = json.loads(saved.read_text())["summary"]
    assert summary["problems"] == [] and "| verdict | good |" in done.stdout
    assert summary["finished"] > 0 and summary["failures"] == []
    assert summary["compared"] > 0 and summary["differences"] == []
    assert summary["leftovers"] == []
    assert summary["draft_back"] and summary["harmed_at"] == []
    assert len(summary["parts"]) == 4
    for part in summary["parts"]:
        assert part["target_mib"] > 100 and part["draft_mib"] > 100 and part["shared_files"] == 1
