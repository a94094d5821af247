"""``vllm serve`` as users run it: OpenAI clients, the bench client, two servers at once, and ends
of every kind that leave nothing behind."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI
from openai.types import Completion

from benchmarks.common import server as serve
from benchmarks.common.prompts import ANSWER
from benchmarks.common.running import counters, leftovers, processes_of
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.clients.task import Task
from benchmarks.serving.records import Load, Seen
from tests.engine.conftest import ROOT
from tests.engine.load import soak
from tests.support.harness import (
    ENGINE,
    ONE_PROCESS,
    OWN_PROCESS,
    SSD,
    START_S,
    wait_for,
    wait_gone,
)

# Without what conftest.py sets to save time: vLLM waits as it does by itself.
AS_USERS_DO = {"PYTHONPATH": str(ROOT)}
SGLANG = ROOT / ".venv-bench" / "bin" / "python"  # its client's environment
METRICS = "SSD metrics: "  # now and then
QUESTIONS = [f"Name one fact about {s}:" for s in ("gold", "Rome", "ants", "rain", "iron")]


@dataclass
class Server:
    """A running server, with what is there of its draft."""

    served: serve.Server
    run_dir: Path
    own: list[psutil.Process]

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.served.url}/v1", api_key="none")

    def engine_core(self) -> psutil.Process:
        return next(p for p in self.served.processes() if "EngineCore" in " ".join(p.cmdline()))


@pytest.fixture(scope="module")
def servers(spoken_pair, tmp_path_factory):
    """Two servers on one machine, started together. The first one says more of each request, and
    answers what it has begun before it ends."""
    folder = tmp_path_factory.mktemp("logs")
    target, draft = spoken_pair
    speculation = {**SSD, "k": 3, "f": 2, "model": draft}
    arguments = {**ENGINE, **OWN_PROCESS, "model": target, "max_model_len": 512}
    arguments["speculative_config"] = speculation
    environment = {**AS_USERS_DO, "VLLM_LOGGING_LEVEL": "INFO"}
    # vLLM's workers in processes of their own end at once at SIGTERM, and their requests with them.
    more = {"shutdown_timeout": 300, "distributed_executor_backend": ONE_PROCESS}
    more["per_request_spec_decode_metrics"] = "detailed"
    with ExitStack() as ends:
        started = [
            ends.enter_context(serve.Server(given, folder / f"{name}.log", environment))
            for name, given in (("one", arguments | more), ("two", arguments))
        ]
        for served in started:
            served.wait_healthy(START_S)
        run_dirs = [served.run_dir() for served in started]
        yield [Server(served, d, processes_of(d)) for served, d in zip(started, run_dirs)]


def lines_of_ssd(server: Server) -> list[str]:
    """What a server's log has of ssd and of its draft."""
    log = server.served.log.read_text(errors="replace")
    return [line for line in log.splitlines() if "SSD: " in line or "DraftServer" in line]


def test_a_start_is_a_few_lines(servers):
    for server in servers:
        starting, *waiting, ready = lines_of_ssd(server)
        what = r"^\(EngineCore pid=\d+\) INFO [^()]* SSD: starting draft \S+ on CPU cores [\d,-]+ "
        assert re.search(what + r"\(k=3, f=2\)$", starting)
        assert all("SSD: still loading the draft (" in line for line in waiting)
        assert " SSD: draft ready (loaded in " in ready
        assert "\x1b" not in server.served.log.read_text(errors="replace"), "colors in a file"


def completion(server: Server, prompt: str, tokens: int = 24, **options: Any) -> Completion:
    return server.client.completions.create(
        model=serve.NAME, prompt=prompt, max_tokens=tokens, temperature=0, **options
    )


def completed(server: Server, prompt: str) -> str:
    return completion(server, prompt).choices[0].text


def streamed_chat(server: Server, question: str) -> str:
    stream = server.client.chat.completions.create(
        model=serve.NAME,
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_two_servers_answer_eight_clients_each_alike(servers):
    """Completions and streamed chats, 8 at a time on both servers: neither disturbs the other."""
    one, two = servers
    work = [(completed, q) for q in QUESTIONS] + [(streamed_chat, q) for q in QUESTIONS]
    with ThreadPoolExecutor(16) as pool:
        futures = [(pool.submit(do, one, q), pool.submit(do, two, q)) for do, q in work]
        pairs = [(a.result(), b.result()) for a, b in futures]
    assert [a for a, _ in pairs] == [b for _, b in pairs]
    assert all(a for a, _ in pairs)
    for server in servers:
        # One at a time, as two cores may leave the drafts none while sixteen are answered.
        assert [do(server, question) for do, question in work] == [a for a, _ in pairs]
        counted = counters(server.run_dir)
        assert counted["rounds"] > 50 and sum(counted["accepted"][1:]) > 0


def test_clients_of_the_benchmarks_see_the_same(servers, spoken_pair, tmp_path):
    """`vllm bench serve`, and the benchmarks' own, whose chats go on from the server's answers."""

    def measured(client: str, load: Load, prompts: list[str]) -> Seen:
        task = Task(servers[0].served.url, spoken_pair[0], load, prompts, tmp_path)
        return CLIENTS[client].measure(task)

    seen = [measured(client, Load("d", 5, 12, 4), QUESTIONS) for client in ("vllm", "own")]
    assert all((one.completed, one.tokens) == (5, 5 * 12) for one in seen)
    assert seen[0].texts == seen[1].texts
    first = QUESTIONS[0] + seen[1].texts[0] + QUESTIONS[1]
    chat = measured("own", Load("d", 1, 12, turns=2), [ANSWER.join(QUESTIONS[:2])])
    assert (chat.completed, chat.tokens) == (2, 2 * 12)
    second = measured("own", Load("d", 1, 12), [first])
    assert chat.texts == [ANSWER.join([seen[1].texts[0], second.texts[0]])]
    assert 0 < chat.ttft.p50 <= chat.e2e.p99 < 1000 * chat.seconds


def test_requests_of_every_kind_at_once(servers, spoken_pair):
    """None fails or stalls, each ends as asked, and greedy texts are the model's own."""
    one, two = (server.served.url for server in servers)
    outcome = asyncio.run(soak(one, two, spoken_pair[0]))
    assert outcome.failures == outcome.differences == []


@pytest.mark.skipif(not SGLANG.exists(), reason="no .venv-bench: run `make bench-client`")
def test_sglang_bench_serving_completes(servers, spoken_pair, tmp_path):
    asked, seen = tmp_path / "asked.json", tmp_path / "seen.jsonl"
    # It takes conversations, and only those with an answer.
    asked.write_text(
        json.dumps([{"conversations": [{"value": q}, {"value": "I know one."}]} for q in QUESTIONS])
    )
    command = [SGLANG, "-m", "sglang.bench_serving", "--backend", "vllm", "--disable-tqdm"]
    command += ["--base-url", servers[0].served.url, "--model", serve.NAME]
    command += ["--tokenizer", spoken_pair[0], "--dataset-path", asked, "--output-file", seen]
    command += ["--num-prompts", "5", "--sharegpt-output-len", "12", "--max-concurrency", "4"]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    figures = json.loads(seen.read_text())
    assert figures["completed"] == 5
    assert figures["total_output_tokens"] == 5 * 12


def test_stats_shows_both_engines(servers, tmp_path):
    """From an environment with another temporary folder, too."""
    command = [Path(sys.executable).with_name("vllm-ssd"), "stats", "--json"]
    elsewhere = {**os.environ, "TMPDIR": str(tmp_path)}
    said = subprocess.run(command, capture_output=True, text=True, env=elsewhere)
    shown = {engine["pid"]: engine for engine in json.loads(said.stdout)}
    for server in servers:
        engine = shown[server.engine_core().pid]
        assert engine["model"] == serve.NAME and engine["draft_serves"]
        assert engine["counters"]["pid"] == counters(server.run_dir)["pid"]


def test_chat(servers, tmp_path):
    """Streamed answers with their speed, a new conversation, and two servers side by side."""
    one, two = (server.served.url for server in servers)
    command = [sys.executable, "-m", "examples.chat", "--max-tokens", "24", "--url", one]
    figures = r"(\d+) tokens, \d+\.\d tokens/s, first token after \d+ ms, \d\.\d\d tokens a round"
    wide = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "200"}

    def says(text: str, *more: str) -> str:
        words, taken = [*command, *more], subprocess.PIPE
        chat = subprocess.run(words, input=text, stdout=taken, text=True, env=wide, timeout=200)
        assert chat.returncode == 0
        return chat.stdout

    said = says("My name is Ada. Who are you?\nWhat is my name?\n/new\n/quit\n")
    assert len(found := re.findall(figures, said)) == 2 and found[0] == "24", said
    assert "a new conversation" in said
    assert "same text" in says("What is my name?\n", "--compare", two)


def test_sigterm_for_every_process_of_a_server_and_the_other_goes_on(servers):
    """As systemd sends it. The server ends what it has begun, with its draft or without, and misses
    neither draft nor keeper."""
    one, two = servers
    rounds = counters(one.run_dir)["rounds"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(completion, one, QUESTIONS[0], 400, extra_body={"ignore_eos": True})
        wait_for("round", lambda: counters(one.run_dir)["rounds"] > rounds)
        seen = len(lines_of_ssd(one))
        for process in (*one.served.processes(), *one.own):
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        assert asked.result().usage.completion_tokens == 400
    one.served.end()
    assert one.served.process.returncode == 0
    wait_gone(one.run_dir, one.own)
    assert [line for line in lines_of_ssd(one)[seen:] if METRICS not in line] == []
    assert not leftovers(two.run_dir, []) == []
    assert completed(two, QUESTIONS[0])
    assert counters(two.run_dir)["rounds"] > 0


def test_killed_engine_core_leaves_nothing(servers):
    """The engine core is gone without a word: the keeper puts the draft away."""
    two = servers[1]
    os.kill(two.engine_core().pid, signal.SIGKILL)
    wait_gone(two.run_dir, two.own)
    two.served.process.wait(60)
