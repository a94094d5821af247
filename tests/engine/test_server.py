"""``vllm serve`` as users run it: OpenAI clients, the bench client, two servers at once, and ends
of every kind that leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from tests.engine.harness import counters, leftovers, processes_of, run_dirs, wait_for

BIN = Path(sys.executable).parent
QUESTIONS = [f"Name one fact about {s}:" for s in ("gold", "Rome", "ants", "rain", "iron")]


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    run_dir: Path
    own: list[psutil.Process]
    log: Path

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none")

    def engine_core(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(c for c in children if "EngineCore" in " ".join(c.cmdline()))

    def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(target: str, speculation: dict | None, log: Path) -> tuple[subprocess.Popen, int]:
    port = free_port()
    command = [BIN / "vllm", "serve", target, "--served-model-name", "target"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]
    if speculation:
        command += ["--speculative-config", json.dumps(speculation)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    return process, port


def healthy(process: subprocess.Popen, port: int, log: Path) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"the server ended at start:\n{log.read_text()[-3000:]}")
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def servers(target, draft, tmp_path_factory):
    """Two servers on one machine, started together."""
    folder = tmp_path_factory.mktemp("logs")
    before = run_dirs()
    speculation = {"method": "ssd", "k": 3, "f": 2, "model": draft}
    started = []
    for name in ("one", "two"):
        log = folder / f"{name}.log"
        started.append((*serve(target, speculation, log), log))
    up: list[Server] = []
    try:
        for process, port, log in started:
            wait_for("healthy server", lambda p=process, q=port, f=log: healthy(p, q, f), 240)
        for process, port, log in started:
            inside = psutil.Process(process.pid).children(recursive=True)
            (run_dir,) = {
                d
                for d in run_dirs() - before
                if any(str(d) in f.path for c in inside for f in c.open_files())
            }
            up.append(Server(process, port, run_dir, processes_of(run_dir), log))
        yield up
    finally:
        for process, *_ in started:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def completion(server: Server, prompt: str) -> str:
    answer = server.client.completions.create(
        model="target", prompt=prompt, max_tokens=24, temperature=0
    )
    return answer.choices[0].text


def streamed_chat(server: Server, question: str) -> str:
    stream = server.client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_two_servers_answer_eight_clients_each_alike(servers):
    """Completions and streamed chats, 8 at a time on both servers: neither disturbs the other."""
    one, two = servers
    work = [(completion, q) for q in QUESTIONS] + [(streamed_chat, q) for q in QUESTIONS]
    with ThreadPoolExecutor(16) as pool:
        futures = [(pool.submit(do, one, q), pool.submit(do, two, q)) for do, q in work]
        pairs = [(a.result(), b.result()) for a, b in futures]
    assert [a for a, _ in pairs] == [b for _, b in pairs]
    assert all(a for a, _ in pairs)
    assert [do(one, question) for do, question in work] == [a for a, _ in pairs]
    for server in servers:
        counted = counters(server.run_dir)
        assert counted["rounds"] > 50 and sum(counted["accepted"][1:]) > 0


def test_vllm_bench_serve_completes(servers, target, tmp_path):
    server = servers[0]
    command = [BIN / "vllm", "bench", "serve", "--model", target, "--served-model-name", "target"]
    command += ["--port", str(server.port), "--dataset-name", "random", "--num-prompts", "8"]
    command += ["--random-input-len", "30", "--random-output-len", "12", "--max-concurrency", "4"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--temperature", "0"]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    (result,) = tmp_path.glob("*.json")
    figures = json.loads(result.read_text())
    assert figures["completed"] == 8
    assert figures["total_output_tokens"] == 8 * 12


def test_stats_shows_both_engines(servers):
    shown = subprocess.run([BIN / "vllm-ssd", "stats"], capture_output=True, text=True, check=True)
    for server in servers:
        assert server.run_dir.name in shown.stdout
    assert "Hit rate" in shown.stdout


def test_interrupted_server_leaves_nothing_and_the_other_goes_on(servers):
    one, two = servers
    one.end(signal.SIGINT)
    wait_for("clean end", lambda: not leftovers(one.run_dir, one.own), 20)
    assert not leftovers(two.run_dir, []) == []
    assert completion(two, QUESTIONS[0])
    assert counters(two.run_dir)["rounds"] > 0


def test_killed_engine_core_leaves_nothing(servers):
    """The engine core is gone without a word: the keeper puts the draft away."""
    two = servers[1]
    os.kill(two.engine_core().pid, signal.SIGKILL)
    wait_for("clean end", lambda: not leftovers(two.run_dir, two.own), 20)
    two.process.wait(60)
