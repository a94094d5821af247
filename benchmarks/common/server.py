"""`vllm serve` in a process of its own, as users run it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common.running import run_dir_of
from vllm_ssd.tools.port import held_port

_VLLM = Path(sys.executable).with_name("vllm")
# The script is missing where vLLM was unpacked and not installed.
_MODULE = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
VLLM = [str(_VLLM)] if _VLLM.exists() else _MODULE
NAME = "target"  # of the model, to clients
END_S = 60.0
_LAST_WORDS = 3000


class ServerFailed(Exception):
    """The server ended, or was not healthy in time; with its last words."""


class Server:
    """One server on a free port of this machine, starting as soon as it is made. As a context it
    is gone at the end."""

    def __init__(
        self, arguments: Mapping[str, Any], log: Path, environment: Mapping[str, str] | None = None
    ):
        """arguments: of the engine, as vLLM's ``LLM`` has them. environment: added to ours."""
        self.port, self._port_holder = held_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [*VLLM, "serve", *command_line(arguments)]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        self._psutil = psutil.Process(self.process.pid)

    def wait_healthy(self, limit_s: float) -> None:
        """Until it answers; ``ServerFailed`` if it ends or takes longer."""
        deadline = time.monotonic() + limit_s
        while not self._healthy():
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended at its start:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"not healthy after {limit_s:g} s:\n{self._last_words()}")
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        """Its own ones, without those of the draft, which are nobody's children."""
        try:
            return [self._psutil, *self._psutil.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def run_dir(self) -> Path | None:
        """Where its engine keeps its files, if that uses method ssd."""
        return run_dir_of(self.processes())

    def end(self, how: signal.Signals = signal.SIGTERM, limit_s: float = END_S) -> None:
        """Have it end; ``subprocess.TimeoutExpired`` if it does not and has to be killed."""
        own = self.processes()
        self.process.send_signal(how)
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            for process in own:  # an engine core would go on, and keep its GPUs
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            raise
        finally:
            self._port_holder.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.TimeoutExpired):  # it is killed, and other servers may go on
            if self.process.poll() is None:
                self.end()

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace")[-_LAST_WORDS:]


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's ``LLM`` as ``vllm serve`` takes them."""
    words = [str(arguments["model"])]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        match value:
            case _ if name == "model":
                continue
            case bool():
                words.append(f"--{option}" if value else f"--no-{option}")
            case dict() | list():
                words += [f"--{option}", json.dumps(value)]
            case _:
                words += [f"--{option}", str(value)]
    return words
