"""Data parallelism: every engine of a server has a draft of its own, and cores of its own, and no
draft stays when its target dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
from openai import OpenAI

from benchmarks.common import server as serve
from benchmarks.common.running import counters, leftovers, processes_of
from tests.engine.test_lossless import PROMPTS, STORIES
from tests.support.harness import ENGINE, SSD, wait_for
from tests.support.scraping import scrape
from vllm_ssd.measure.own_engine import run_dir_of
from vllm_ssd.service import rundir


def test_two_engines_of_one_server(target, draft, plain, tmp_path):
    before = set(rundir.living())
    speculation = {**SSD, "k": 3, "f": 1, "model": draft}
    arguments = {**ENGINE, "model": target, "max_model_len": 256, "data_parallel_size": 2}
    log = tmp_path / "log"
    server = serve.Server({**arguments, "speculative_config": speculation}, log)
    try:
        server.wait_healthy(300)
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

        def ask(prompt: str) -> list[int]:
            answer = client.completions.create(
                model=serve.NAME,
                prompt=prompt,
                max_tokens=24,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            return answer.choices[0].token_ids

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, PROMPTS[STORIES]))
        assert found == [tokens[:24] for tokens, _ in plain["batch"][STORIES]]
        run_dirs = set(rundir.living()) - before
        counted = [counters(run_dir) for run_dir in run_dirs]
        assert len(counted) == 2 and all(sum(each["accepted"][1:]) > 0 for each in counted)
        own = {run_dir: processes_of(run_dir) for run_dir in run_dirs}
        # With one API server for each engine by default: any of them answers for both.
        for _ in range(4):
            rounds = scrape(server.url)["vllm:ssd_round_tokens_count"]
            assert sorted(rounds) == [("0",), ("1",)]
            assert sorted(rounds.values()) == sorted(sum(each["accepted"]) for each in counted)
        both = {("0",): 1, ("1",): 1}
        wait_for("both drafts", lambda: scrape(server.url)["vllm:ssd_draft_up"] == both)

        worker = next(p for p in server.processes() if "Worker" in " ".join(p.cmdline()))
        of_it = run_dir_of([psutil.Process(worker.ppid())])
        worker.kill()
        wait_for("end of its draft", lambda: not leftovers(of_it, own[of_it]), 20)
    finally:
        if server.process.poll() is None:
            server.end()
    for run_dir, processes in own.items():
        wait_for("clean end", lambda d=run_dir, p=processes: not leftovers(d, p), 20)
