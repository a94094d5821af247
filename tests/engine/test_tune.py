"""`vllm-ssd tune`, as users run it: real servers, few tokens. Which candidates are measured, and
what is made of their figures, is shown in tests/unit/tools/tune."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.common.running import run_dir_of
from tests.support.harness import ONE_PROCESS, wait_for, wait_gone
from tests.support.starts import ROOT

SMALL = "--k 2 --f 1 --clients 2 --requests 2 --tokens 8 --temperature 0".split()
ENGINE = "--dtype float32 --enforce-eager --max-num-seqs 4 --max-model-len 256".split()
ENGINE += ["--distributed-executor-backend", ONE_PROCESS]
# The draft is as slow as its target, and would never be worth a wait.
OPTIONS = ["--speculative-config", '{"on_miss": "wait"}']


@pytest.fixture
def base_model(spoken_pair, tmp_path) -> str:
    """The target without its chat template: a tuning gives it one."""
    folder = tmp_path / "base"
    shutil.copytree(spoken_pair[0], folder, copy_function=os.symlink)
    (folder / "chat_template.jinja").unlink()
    return str(folder)


def test_a_draft_is_compared_with_plain_vllm(base_model, spoken_pair, tmp_path):
    """In two calls: the first one is asked to end while the second server is there."""
    words = ["tune", base_model, "--draft", spoken_pair[1], "--results", str(tmp_path / "results")]
    command = [sys.executable, "-m", "vllm_ssd.cli", *words, *SMALL, *ENGINE, *OPTIONS]

    first = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("[2 of at most 2]"):
            break
    started = psutil.Process(first.pid)

    def find() -> Path | None:
        with suppress(psutil.NoSuchProcess):
            return run_dir_of(started.children(recursive=True))

    run_dir = wait_for("draft", find, 600)
    processes = started.children(recursive=True)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 130, first.stderr.read()
    wait_gone(run_dir, processes)

    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert second.stderr.count("measured before") == 1, "plain vLLM"
    (plain,), (drafted,) = (
        json.loads(next(tmp_path.glob(f"results/*/*{name}/*/summary.json")).read_text())
        for name in ("plain-vLLM", "k=2-f=1")
    )
    assert plain["completed"] == drafted["completed"] == 4
    assert drafted["spec_decode_acceptance_length"] > 1.5
    table, answer = second.stdout.split("\n\n")
    assert f"{plain['output_throughput']:.1f}     1.00" in table
    assert answer.startswith(("Use this, ", "Leave ssd off: "))
