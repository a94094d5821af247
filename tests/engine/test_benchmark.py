"""The benchmark's command line, with a side of each kind: plain, ssd, and ssd without its draft."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIDES = ["ar", "ssd k=3 f=1 on_miss=wait", "away k=3"]


def test_quick(target, tmp_path):
    """The target is a checkpoint and the draft a stand-in without weights, so that the draft's
    process, too, must have found the load format."""
    saved = tmp_path / "table.json"
    command = [sys.executable, "-m", "benchmarks.offline", "--quick", "--json", str(saved)]
    command += ["--models", str(Path(target).parent), "--logs", str(tmp_path)]
    # A start keeps one core busy, and one side after the other is measured nevertheless.
    command += ["--together", "2", "--sides", "ar,ssd,away"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    rows = json.loads(saved.read_text())["rows"]
    assert [row["side"] for row in rows] == SIDES
    assert [row["text"] for row in rows] == [None, "identical", "identical"]
    plain, drafted, away = rows
    assert plain["tokens_per_round"] == 1
    assert drafted["tokens_per_round"] > 1.5 and len(drafted["acceptance"]) == 3, drafted
    for row in (drafted, away):
        assert abs(row["hit"] + row["miss"] + row["late"] - 1) < 1e-9, row
    assert away["tokens_per_round"] == away["late"] == 1, "drafts of a draft that is gone"
    table = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    side = table[0].index("side")
    assert [row[side] for row in table[2:]] == SIDES
    assert "stand-in" in done.stdout
