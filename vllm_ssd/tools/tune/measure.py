"""Serves a candidate with ``vllm serve`` and measures it with ``vllm bench serve``."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import msgspec
import psutil

from vllm_ssd.tools.check.findings import say
from vllm_ssd.tools.tune.candidates import Candidate, Figures, Outcome

PROMPTS = "prompts.jsonl"  # file in the folder of results
_VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
_WARM_UPS = 2  # warm-up requests of each client
END_S = 60.0  # timeout for the end of a server and its draft
_ROUNDS = re.compile(r'^vllm:ssd_rounds_total\{.*result="(\w+)".*\} (\S+)$', re.MULTILINE)


class Failed(Exception):
    """A candidate could not be measured. The message says why and names the log."""


@dataclass(frozen=True)
class Measurer:
    """Measures candidates. args: the command's options. further: arguments of ``vllm serve``.
    folder: for results and logs. environment: variables of servers and clients."""

    args: Namespace
    further: Sequence[str]
    folder: Path
    environment: Mapping[str, str]

    def measure(self, candidate: Candidate) -> Outcome:
        """Figures of a candidate by number of clients. Reads figures that an earlier call saved,
        and measures the others with a server. Raises ``Failed``."""
        path = self.folder / re.sub(r"[^\w.=-]+", "-", candidate.name)
        saved = {clients: Path(f"{path}-{clients}.json") for clients in self.args.clients}
        outcome = {clients: _read(file) for clients, file in saved.items() if file.exists()}
        for clients, figures in outcome.items():
            say(f"  {clients} at once: {figures.output_throughput:.1f} tokens/s, measured before")
        if len(outcome) == len(saved):
            return outcome
        words = [self.args.target, *self.further]
        if candidate.draft is not None:
            options = candidate.speculative_config(self.args.speculative_config)
            words += ["--speculative-config", json.dumps(options)]
        deadline = time.monotonic() + self.args.limit
        with _server(words, Path(f"{path}.log"), self.environment, deadline) as url:
            for clients, file in saved.items():
                if clients not in outcome:
                    figures = outcome[clients] = self._bench(url, clients, file, deadline)
                    say(f"  {clients} at once: {figures.output_throughput:.1f} tokens/s")
        return outcome

    def _bench(self, url: str, clients: int, saved: Path, deadline: float) -> Figures:
        part, log = saved.with_suffix(".part"), saved.with_suffix(".log")
        requests = self.args.requests * clients
        options = {
            "base-url": url,
            "backend": "openai-chat",
            "endpoint": "/v1/chat/completions",
            "dataset-name": "custom_image",  # also takes text alone; "custom" needs pandas
            "dataset-path": self.folder / PROMPTS,
            "custom-output-len": self.args.tokens,
            "num-prompts": requests,
            "max-concurrency": clients,
            "num-warmups": _WARM_UPS * clients,
            "result-filename": part,
        }
        if self.args.temperature is not None:
            options["temperature"] = self.args.temperature
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words = [*_VLLM, "bench", "serve", "--disable-shuffle", "--save-result", *words]
        before = _rounds(url)
        complete = False
        with log.open("wb") as output, suppress(subprocess.TimeoutExpired):
            left_s = deadline - time.monotonic()
            done = subprocess.run(
                words, stdout=output, stderr=output, env=self.environment, timeout=left_s
            )
            complete = done.returncode == 0 and _read(part).completed == requests
        if not complete:
            raise Failed(
                f"vllm bench serve failed or took too long with {clients} clients: see {log}"
            )
        rounds = _rounds(url) - before
        told = json.loads(part.read_text())
        told["ssd_hit_rate"] = rounds["hit"] / rounds.total() if rounds else None
        part.write_text(json.dumps(told))
        part.rename(saved)  # a file with this name is complete
        return _read(saved)


@contextmanager
def _server(
    words: Sequence[str], log: Path, environment: Mapping[str, str], deadline: float
) -> Iterator[str]:
    """Run ``vllm serve WORDS`` and yield its URL once it answers; afterwards end it and its draft.
    Raises ``Failed`` without an answer by ``deadline``, in seconds of the monotonic clock."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*_VLLM, "serve", *words, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        # A session of its own keeps Ctrl-C from the server, which this process ends.
        process = psutil.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while not _answers(url):
            if process.poll() is not None:
                raise Failed(f"its server ended before it was ready: see {log}")
            if time.monotonic() > deadline:
                raise Failed(f"its server was not ready within --limit: see {log}")
            time.sleep(1)
        yield url
    finally:
        with suppress(psutil.NoSuchProcess):
            processes = [process, *process.children(recursive=True)]  # includes the draft's keeper
            process.terminate()
            for left in psutil.wait_procs(processes, END_S)[1]:
                left.kill()


def _answers(url: str) -> bool:
    with suppress(OSError), urlopen(f"{url}/health", timeout=5):
        return True
    return False


def _rounds(url: str) -> Counter[str]:
    """Number of rounds by result of the first lookup, such as "hit"; empty for plain vLLM."""
    with urlopen(f"{url}/metrics", timeout=60) as metrics:
        text = metrics.read().decode()
    counted: Counter[str] = Counter()
    for result, value in _ROUNDS.findall(text):
        counted[result] += int(float(value))
    return counted


def _read(saved: Path) -> Figures:
    return msgspec.convert(json.loads(saved.read_text()), Figures)
