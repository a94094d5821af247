"""Data parallelism: all engines of a server share one draft, which the first of them starts; each
has cores of its own; and nothing stays when they are gone."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.common import server as serve
from benchmarks.common.running import counters, processes_of, run_dir_of
from tests.engine.test_lossless import PROMPTS, STORIES
from tests.support.greedy_texts import text_answers
from tests.support.harness import (
    ENGINE,
    OWN_PROCESS,
    SSD,
    START_S,
    tokens_after,
    wait_for,
    wait_gone,
)
from tests.support.scraping import scrape
from vllm_ssd.table import SpeculationTable, TableOwner, rundir


def test_two_engines_of_one_server(spoken_pair, tmp_path, monkeypatch):
    target, draft = spoken_pair
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    speculation = {**SSD, "k": 3, "f": 1, "model": draft}
    arguments = {**ENGINE, **OWN_PROCESS, "model": target, "max_model_len": 256}
    arguments["data_parallel_size"] = 2
    arguments["speculative_config"] = speculation
    with serve.Server(arguments, tmp_path / "log") as server:
        expected = text_answers(target, PROMPTS[STORIES], 24)
        server.wait_healthy(START_S)

        def ask(prompt: str) -> list[int]:
            return tokens_after(server.url, serve.NAME, prompt, 24)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, PROMPTS[STORIES]))
        assert found == [tokens for tokens, _ in expected]
        owners = owners_of({process.pid for process in server.processes()})
        (service,) = (run_dir for run_dir, owner in owners.items() if not owner.model)
        engines = [run_dir for run_dir in owners if run_dir != service]
        assert sorted(owners[run_dir].engine for run_dir in engines) == [0, 1]
        assert len({owner.draft_server for owner in owners.values()}) == 1
        counted = [counters(run_dir) for run_dir in engines]
        assert all(sum(each["accepted"][1:]) > 0 for each in counted)
        wait_for("both", lambda: counters(service)["joined"] == 2)
        assert {counters(run_dir)["pid"] for run_dir in owners} == {counters(service)["pid"]}
        own = processes_of(service)
        # With one API server for each engine by default: any of them answers for both.
        for _ in range(4):
            rounds = scrape(server.url)["vllm:ssd_round_tokens_count"]
            assert sorted(rounds) == [("0",), ("1",)]
            assert sorted(rounds.values()) == sorted(sum(each["accepted"]) for each in counted)
        both = {("0",): 1, ("1",): 1}
        wait_for("both drafts", lambda: scrape(server.url)["vllm:ssd_draft_up"] == both)

        (first,) = (run_dir for run_dir in engines if owners[run_dir].engine == 0)
        core = psutil.Process(owners[first].pid)
        assert run_dir_of([core]) == first, "not that of the draft, which it has started"
        worker = next(p for p in core.children() if "Worker" in " ".join(p.cmdline()))
        worker.kill()
        wait_gone(first)
    for run_dir in owners:
        wait_gone(run_dir, own)


def owners_of(processes: set[int]) -> dict[Path, TableOwner]:
    """The run directories that these processes have made, and whose they are."""
    found = {}
    for run_dir in rundir.living():
        with suppress(ValueError, OSError):  # of others, which end or are of another version
            owner = SpeculationTable.open(rundir.table_path(run_dir), writable=False).owner
            if owner.pid in processes:
                found[run_dir] = owner
    return found
