"""A draft on another node: texts are the plain engine's, there are hits, and a link that is cut
for ten seconds costs no request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common import server as serve
from benchmarks.common.running import counters, leftovers, processes_of
from benchmarks.remote.nodes import Node, another_node, why_not
from benchmarks.soak.requests import Choice, Question
from tests.engine.deaths import Draft
from tests.engine.load import Load
from tests.support.harness import ENGINE, engine, greedy, texts, wait_for
from vllm_ssd.metrics import rates, subtract
from vllm_ssd.service.draft_names import find

AT_ONCE, TOKENS, ROUNDS = 3, 48, 60  # requests, tokens of each, rounds looked at
START_S, END_S, CUT_S = 180.0, 20.0, 10.0
OPTIONS: dict[str, Any] = {**ENGINE, "max_model_len": 256, "skip_tokenizer_init": True}
NAME = f"tests-{os.getpid()}"
# The draft has a core, and the target the other.
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
LOST, BACK = f"the draft server '{NAME}' is lost", f"the draft server '{NAME}' is back"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    if reason := why_not():
        pytest.skip(reason)
    with another_node() as node:
        yield node


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


class Service:
    """`vllm-ssd draft` on the other node."""

    def __init__(self, node: Node, draft: Path, folder: Path):
        self.key_file, self.log = folder / "drafts.key", folder / "service.log"
        command = [sys.executable, "-m", "vllm_ssd.cli", "draft", str(draft), "--name", NAME]
        command += ["--listen", f"{node.there}:7400", "--key-file", str(self.key_file)]
        command += "--device 1 --k 3 --f 1 --dtype float32 --max-model-len 256".split()
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                node.command(*command, "--max-num-seqs", "16"),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            return "and on other nodes with" in self.log.read_text(errors="replace")

        wait_for("draft server", ready, START_S)
        self.run_dir, _ = find(NAME)
        self.draft = Draft(self.run_dir)

    def relay(self) -> psutil.Process:
        """The draft's end of it."""
        own = psutil.Process(self.process.pid).children()
        (found,) = [child for child in own if "vllm_ssd.relay.draft_end" in child.cmdline()]
        return found

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(END_S) == 0


class Served:
    """A server whose draft is there. load: what it is asked now."""

    def __init__(self, server: serve.Server, questions: list[Question], answers: list[Choice]):
        self.server = server
        run_dir = server.run_dir()
        assert run_dir is not None
        self.run_dir = run_dir
        self._asked = questions, answers

    @contextmanager
    def under_load(self) -> Iterator[Load]:
        """Meanwhile; no request fails, and no text is another than the plain one."""
        load = Load(self.server.url, AT_ONCE, *self._asked)
        with load.running():
            yield load
        load.check()
        assert load.outcome.compared >= AT_ONCE

    def rounds(self, load: Load) -> dict[str, Any]:
        """What is counted in the next rounds."""
        before = counters(self.run_dir)
        end = before["rounds"] + ROUNDS
        load.until("rounds", lambda: counters(self.run_dir)["rounds"] >= end)
        return subtract(counters(self.run_dir), before)

    def said(self, text: str) -> int:
        return self.server.log.read_text(errors="replace").count(text)


@pytest.fixture(scope="module")
def service(node, busy_pair, folder) -> Iterator[Service]:
    one = Service(node, busy_pair[1], folder)
    try:
        one.wait_ready()
        yield one
    finally:
        if one.process.poll() is None:
            one.end()


@pytest.fixture(scope="module")
def served(service, busy_pair, folder) -> Iterator[Served]:
    target = str(busy_pair[0])
    speculation = {"method": "ssd", "draft_server": NAME, "on_miss": "wait"}
    speculation["draft_server_key"] = str(service.key_file)
    arguments = {**OPTIONS, "model": target, "speculative_config": speculation}
    prompts = [[(7 * n + m**2) % 400 for m in range(5 + 2 * n)] for n in range(AT_ONCE)]
    with ExitStack() as ends:
        server = serve.Server(arguments, folder / "server.log", CORES)
        ends.callback(lambda: server.process.poll() is None and server.end())
        with engine(target, **OPTIONS) as llm:
            sampling = greedy(TOKENS, ignore_eos=True, detokenize=False)
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            found = texts(llm.generate(asked, sampling, use_tqdm=False))
        server.wait_healthy(START_S)
        answers = [Choice("", *answer) for answer in found]
        yield Served(server, [Question(prompt, TOKENS) for prompt in prompts], answers)


def test_drafts_from_another_node(served, service, node):
    """And nothing of it listens at another address than the one that was chosen."""
    with served.under_load() as load:
        counted = served.rounds(load)
        assert rates(counted)["hit"] > 0.2, counted
        assert counted["link_us"] > 0 and counted["pid"] == service.draft.counted()["pid"]
    (address,) = node.listening(service.relay().pid)
    assert address in (f"{node.there}:7400", f"[::ffff:{node.there}]:7400")


def test_a_link_that_is_cut(served, service, node):
    """Nobody waits for drafts meanwhile; then they are back."""
    lost = served.said(LOST)
    with served.under_load() as load:
        served.rounds(load)
        node.cut()
        began = time.monotonic()
        try:
            load.until("loss", lambda: served.said(LOST) > lost)
            without = served.rounds(load)
            load.until("ten seconds", lambda: time.monotonic() - began > CUT_S)
        finally:
            node.mend()
        assert not without["hits"]
        load.until("return", lambda: served.said(BACK) == served.said(LOST))
        load.until("hits", lambda: rates(served.rounds(load))["hit"] > 0.2)
    assert counters(served.run_dir)["restarts"] == served.said(BACK) > lost
    wait_for("end of the old session", lambda: service.draft.counted()["joined"] == 1, END_S)


def test_nothing_is_left(served, service):
    own = [*served.server.processes(), *processes_of(served.run_dir)]
    theirs = [service.relay(), *processes_of(service.run_dir)]
    served.server.end()
    wait_for("end of the server", lambda: not leftovers(served.run_dir, own), END_S)
    wait_for("end of the session", lambda: service.draft.counted()["joined"] == 0, END_S)
    service.end()
    wait_for("end of the service", lambda: not leftovers(service.run_dir, theirs), END_S)
