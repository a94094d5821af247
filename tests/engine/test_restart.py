"""The draft dies again and again, in every way there is from outside, while requests run: nothing
fails, nothing is stuck, every text is the plain engine's, and the drafts come back each time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.running import alive, counters, leftovers, processes_of
from tests.engine.harness import engine, greedy, own_run_dir, texts, wait_for
from tests.engine.test_lossless import PROMPTS
from vllm_ssd import rundir
from vllm_ssd.table import SpeculationTable

REQUESTS = 16
OPTIONS = {"max_num_seqs": REQUESTS, "max_model_len": 256}
IN_A_ROW = 8
SLACK = 8  # open files that may come or go
STALL_S, STUCK_S = 30, 180


class Load:
    """So many requests at all times: each that ends is compared, and begins again."""

    def __init__(self, llm: Any, plain: list[Any]):
        self._engine = llm.llm_engine
        self._plain = plain
        self._going: dict[str, int] = {}
        self._count = 0
        self.finished = 0
        for prompt in range(REQUESTS):
            self._ask(prompt)

    def _ask(self, prompt: int) -> None:
        self._count += 1
        self._engine.add_request(str(self._count), PROMPTS[prompt], greedy())
        self._going[str(self._count)] = prompt

    def step(self, again: bool = True) -> None:
        began = time.monotonic()
        outputs = self._engine.step()
        assert time.monotonic() - began < STALL_S, "the engine stood still"
        for output in outputs:
            if output.finished:
                prompt = self._going.pop(output.request_id)
                assert texts([output]) == [self._plain[prompt]], "a text is not the plain engine's"
                self.finished += 1
                if again:
                    self._ask(prompt)

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Go on until there is a true value of ``condition``."""
        deadline = time.monotonic() + STUCK_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"no {what} within {STUCK_S} s"
            self.step()
        return value

    def end(self) -> None:
        while self._going:
            self.step(again=False)


class Draft:
    """The draft of one engine, and ways for it to die. seen: every process it ever had."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.seen: dict[int, psutil.Process] = {}
        self._table = SpeculationTable.open(rundir.table_path(run_dir))

    def processes(self) -> list[psutil.Process]:
        found = alive(processes_of(self.run_dir))
        self.seen |= {process.pid: process for process in found}
        return found

    def named(self, name: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found += [process] if name in " ".join(process.cmdline()) else []
        return found

    def counted(self) -> dict[str, Any]:
        return counters(self.run_dir)

    def drafts_after(self, pid: int) -> Callable[[], bool]:
        """Whether a later server than this one has had drafts accepted."""
        before = self.counted()

        def drafts() -> bool:
            now = self.counted()
            if now["pid"] == pid:
                before.update(now)
            return sum(now["accepted"][1:]) > sum(before["accepted"][1:]) + REQUESTS

        return drafts

    @contextmanager
    def damaged(self) -> Iterator[None]:
        """Withdraw what the draft publishes, again and again, so that it cannot go on with it."""
        done = threading.Event()

        def damage() -> None:
            while not done.wait(0.001):
                self._table.slots["prediction"]["stamp"] = 0

        thread = threading.Thread(target=damage)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def killed(draft: Draft, load: Load) -> None:
    psutil.Process(draft.counted()["pid"]).kill()


def killed_in_a_row(draft: Draft, load: Load) -> None:
    """While it serves, and then each time while it loads."""
    dead = {draft.counted()["pid"]}
    killed(draft, load)

    def loading() -> list[psutil.Process]:
        return [p for p in draft.named("ray::DraftServer") if p.pid not in dead]

    for _ in range(IN_A_ROW - 1):
        (process,) = load.until("process of a new draft", loading)
        process.kill()
        dead.add(process.pid)


def stopped(draft: Draft, load: Load) -> None:
    psutil.Process(draft.counted()["pid"]).suspend()


def without_ray(draft: Draft, load: Load) -> None:
    (raylet,) = [p for p in draft.processes() if p.name() == "raylet"]
    raylet.kill()


def raising(draft: Draft, load: Load) -> None:
    with draft.damaged():
        load.until("exception in a round", lambda: draft.counted()["heartbeat"] == 0)


# Each leaves traces for the next one; 20 deaths.
DEATHS = [killed, raising, killed_in_a_row, without_ray, stopped, killed_in_a_row]


@pytest.fixture(scope="module")
def plain(target):
    with engine(target, **OPTIONS) as llm:
        return texts(llm.generate(PROMPTS[:REQUESTS], greedy(), use_tqdm=False))


def test_the_draft_comes_back_every_time(target, draft, plain):
    speculation = {"method": "ssd", "k": 3, "f": 1, "model": draft, "max_restarts": 100}
    with engine(target, speculative_config=speculation, **OPTIONS) as llm:
        ours = Draft(own_run_dir())
        load = Load(llm, plain)
        load.until("drafts", ours.drafts_after(0))
        held = open_files(ours)
        before = kinds(ours)
        for number, die in enumerate(DEATHS):
            pid = ours.counted()["pid"]
            back = ours.drafts_after(pid)
            die(ours, load)
            load.until(f"drafts after death {number}, {die.__name__}", back)
            assert pid not in {process.pid for process in ours.processes()}
        load.end()
        assert ours.counted()["restarts"] == len(DEATHS) + 2 * (IN_A_ROW - 1)
        assert open_files(ours) == pytest.approx(held, abs=SLACK)
        # Ray's agents outlive a Ray that is killed by a minute or so.
        wait_for("end of what is left of Ray", lambda: kinds(ours) == before, 90)
    wait_for("end of all processes and files", lambda: not left(ours), 90)


def kinds(draft: Draft) -> Counter[str]:
    """How many processes there are of each name."""
    return Counter(process.name() for process in draft.processes())


def open_files(draft: Draft) -> list[int]:
    """Of the engine core, and of the keeper."""
    children = psutil.Process().children(recursive=True)
    (core,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    (keeper,) = draft.named("vllm_ssd.draft.keeper")
    return [core.num_fds(), keeper.num_fds()]


def left(draft: Draft) -> list[str]:
    return leftovers(draft.run_dir, list(draft.seen.values()))
