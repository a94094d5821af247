"""Engines started in processes of their own: what they say, and how they end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.harness import START_S

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib, json, sys

importlib.import_module(sys.argv[1])
from tests.support.harness import engine, greedy, texts

if __name__ == "__main__":
    with engine(sys.argv[2], **json.loads(sys.argv[3])) as llm:
        print("served:", texts(llm.generate(["A river is"], greedy(8), use_tqdm=False)))
"""


def make_start(folder: Path, setting: str, target: str, **engine: Any) -> Callable[..., Any]:
    """Starts an engine that serves one request and ends; what it printed. setting: the module that
    sets its environment. engine: its options.

    What it returns takes options of method ssd, words before the command, and whether the engine
    ``serves`` the request and ends well, or does neither.
    """
    script = folder / "start.py"
    script.write_text(SCRIPT)

    def run(*before: str, serves: bool, **options: Any) -> str:
        speculation = {"method": "ssd", "k": 3, "f": 1, **options}
        arguments = json.dumps({**engine, "speculative_config": speculation})
        done = subprocess.run(
            [*before, sys.executable, str(script), setting, target, arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
        )
        assert ("served:" in done.stdout) == (done.returncode == 0) == serves, done.stdout
        return done.stdout

    return run
