"""``vllm-ssd draft`` in a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.common.running import processes_of
from tests.engine.deaths import Draft
from tests.support.harness import END_S, START_S, wait_for
from vllm_ssd.table.draft_names import find_all

NAME = f"tests-{os.getpid()}"
CORE = "0" if os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "1" else "1"  # targets leave it
LOST, BACK = f"the draft server '{NAME}' is lost", f"the draft server '{NAME}' is back"


class Service:
    """A draft service of the name ``NAME``. flags: where it runs. environment: added to this
    process's. Once it is ready, ``drafts`` are all that it has and ``draft`` is the first one."""

    def __init__(self, model: Path, log: Path, flags: str = f"--device {CORE}", **environment: str):
        self.log = log
        self._command = [sys.executable, "-m", "vllm_ssd.cli", "draft", str(model), "--name", NAME]
        self._command += "--k 3 --f 1 --dtype float32 --max-model-len 256".split()
        self._command += ["--max-num-seqs", "16", *flags.split()]
        self._environment = environment

    @contextmanager
    def running(self) -> Iterator[None]:
        """From its start until it is ended, by the test or at the end."""
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
            )
        try:
            self.wait_ready()
            yield
        finally:
            if self.process.poll() is None:
                self.end()

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            return bool(self.said("engines join it"))

        wait_for("draft server", ready, START_S)
        self.drafts = [Draft(run_dir) for run_dir, _ in find_all(NAME)]
        self.draft = self.drafts[0]
        self.run_dir = self.draft.run_dir

    def said(self, text: str) -> int:
        """How often the log has this."""
        return self.log.read_text(errors="replace").count(text)

    def joined(self) -> int:
        """Engines that it drafts for."""
        found: int = self.draft.counted()["joined"]
        return found

    def processes(self) -> list[psutil.Process]:
        """All but the one that has started the others."""
        children = psutil.Process(self.process.pid).children()
        return [each for draft in self.drafts for each in processes_of(draft.run_dir)] + children

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(END_S) == 0
