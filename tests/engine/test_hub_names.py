"""A ``vllm serve`` command of the README, word for word, with the wheel in an environment of its
own: models by their names on the Hub, from a cache that has tiny ones under these names.
unit/test_hub_names.py follows every command to where its processes begin."""

import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.common.running import counters, processes_of, run_dir_of
from tests.support.harness import END_S, START_S, serves, tokens_after, wait_for, wait_gone
from tests.support.hub_cache import answer, folder_of, store_pair
from tests.support.pages import text_of
from tests.support.wheel import build_wheel, environment, install, unpack_sources

COMMAND = min(
    (
        shlex.split(line)
        for line in text_of("README.md").splitlines()
        if line.startswith("    vllm serve") and "-tp" in line
    ),
    key=lambda words: int(words[words.index("-tp") + 1]),  # each rank takes a core's time
)
PORT = 8000  # vLLM's own
URL = f"http://127.0.0.1:{PORT}"
PROMPTS = ["Once upon a time", "The capital of France is", "A river", "x"]
TOKENS = 48


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[Path]:
    """Processes that start find the models of the command in this ``HF_HOME``."""
    home = tmp_path_factory.mktemp("hub")
    store_pair(home, COMMAND[2], json.loads(COMMAND[-1])["model"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        programs = install(build_wheel(unpack_sources(home / "sources")), home / "venv")
        patch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # it takes minutes on two cores
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for sleep and new weights over HTTP
        # Each rank gets its cores from ssd.
        patch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
        yield home


@contextmanager
def served(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", PORT))  # or another server would be asked
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), cwd=log.parent
        )

    def answers() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with suppress(httpx.TransportError):
            return httpx.get(f"{URL}/health").status_code == httpx.codes.OK
        return False

    try:
        wait_for("server", answers, START_S)
        yield process
    finally:
        if process.poll() is None:
            process.kill()


def test_a_command_of_the_readme(cache, tmp_path):
    """Texts are the target's own, drafts are accepted, and nothing is left at the end. Only the
    first of the ranks looks into the table, and all verify the same drafts. Sleep and new weights
    reach workers in processes of their own. (In test_equal_draft.py the engine core is one.)"""
    expected = [answer(prompt, TOKENS) for prompt in PROMPTS]

    def ask(prompt: str) -> list[int]:
        return tokens_after(URL, COMMAND[2], prompt, TOKENS)

    with served(COMMAND, tmp_path / "log") as server:
        process = psutil.Process(server.pid)
        run_dir = run_dir_of(process.children(recursive=True))
        own = processes_of(run_dir)

        def accepted() -> int:
            """Draft tokens; the draft may have no time at first."""
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                assert list(pool.map(ask, PROMPTS)) == expected
            return sum(counters(run_dir)["accepted"][1:])

        first = wait_for("accepted draft tokens", accepted, START_S)
        httpx.post(f"{URL}/sleep", timeout=START_S).raise_for_status()
        assert not serves(counters(run_dir))
        httpx.post(f"{URL}/wake_up", timeout=START_S).raise_for_status()
        wait_for("draft", lambda: serves(counters(run_dir)), START_S)
        weights = folder_of(cache, json.loads(COMMAND[-1])["model"])
        reload = {"method": "reload_draft", "args": [str(weights)]}
        httpx.post(f"{URL}/collective_rpc", json=reload, timeout=START_S).raise_for_status()
        wait_for("draft", lambda: serves(counters(run_dir)), START_S)
        wait_for("accepted draft tokens again", lambda: accepted() > first, START_S)
        server.send_signal(signal.SIGINT)
        assert server.wait(END_S) == 0
    wait_gone(run_dir, own)
