"""`vllm-ssd tune`, as users run it: real engines, few tokens. That the best is found, and what is
said of it, is shown in tests/unit/tune."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.starts import ROOT
from vllm_ssd import cli

SMALL = "--k 2 --f 1 --clients 2 --requests 3 --tokens 8 --temperature 0".split()
ENGINE = "--dtype float32 --enforce-eager --max-num-seqs 4 --max-model-len 256".split()
# The draft is as slow as its target, and would never be worth a wait.
OPTIONS = ["--speculative-config", '{"on_miss": "wait"}']


def test_a_draft_is_compared_with_plain_vllm(target, draft, tmp_path, monkeypatch, capsys):
    """And a second call starts no engine for what the first has measured."""
    saved, picture = tmp_path / "results.jsonl", tmp_path / "plot.svg"
    files = ["--results", str(saved), "--plot", str(picture), "--logs", str(tmp_path)]
    words = ["tune", target, "--draft", draft, *files, *SMALL, *ENGINE, *OPTIONS]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_ssd.cli", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line)["outcome"] for line in saved.read_text().splitlines()]
    assert [outcome["candidate"]["draft"] for outcome in outcomes] == [None, draft]
    (plain,), (drafted,) = (outcome["figures"] for outcome in outcomes)
    assert plain["tokens_per_round"] == 1 and plain["hit"] is None
    logs = "\n".join(path.read_text(errors="replace") for path in tmp_path.glob("*k=2*.log"))
    assert drafted["tokens_per_round"] > 1.5 and 0 <= drafted["hit"] <= 1, f"{drafted}\n{logs}"
    assert "[0 of at most 12 done]" in done.stderr
    assert "Use " in done.stdout or "Leave ssd off: " in done.stdout
    assert picture.read_text().startswith("<?xml")

    # The command sets them for its process, which is this one now.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert said.err.count("measured before") == 2 and "its engine starts" not in said.err
    assert said.out == done.stdout, "the same figures, and the same answer"
