"""`vllm-ssd draft` in a process of its own, as users run it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.models import Model
from vllm_ssd.config.draft_server import FLAGS
from vllm_ssd.table.draft_names import find_all

_LAST_WORDS = 3000


def service_words(
    draft: Model, name: str, device: str, requests: int, dtype: str, options: dict[str, Any]
) -> list[str]:
    """What comes after "draft" on the command line. device: several drafts as `vllm-ssd draft`
    takes them. requests: of all engines at a time. options: of method ssd; those that engines have
    by themselves are left out."""
    words = [draft.path, "--name", name, "--device", device, "--dtype", dtype]
    words += ["--max-num-seqs", str(requests)]
    words += ["--draft-load-config", f'{{"load_format": "{draft.load_format}"}}']
    for option, value in options.items():
        if option in FLAGS:
            said = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{option.replace('_', '-')}", said]
    return words


class DraftServer:
    """One that starts as soon as it is made. words: after "draft". environment: added to ours."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]):
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_ssd.cli", "draft", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def wait_named(self, name: str, limit_s: float) -> None:
        """Until engines can start, which may join it once its drafts are loaded."""
        self._wait(lambda: bool(drafts_named(name)), limit_s)

    def wait_loaded(self, limit_s: float) -> None:
        """Until its drafts are loaded."""
        self._wait(lambda: b"engines join it with" in self._log.read_bytes(), limit_s)

    def _wait(self, done: Callable[[], bool], limit_s: float) -> None:
        """Ends the program, with the server's last words, if it ends or takes longer."""
        deadline = time.monotonic() + limit_s
        while not done():
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(self._log.read_text(errors="replace")[-_LAST_WORDS:])
            time.sleep(0.2)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def drafts_named(name: str) -> list[Path]:
    """The run directories of a service's drafts; none if there is no such service."""
    try:
        return [run_dir for run_dir, _ in find_all(name)]
    except ValueError:
        return []
