"""Measures a candidate with ``vllm bench sweep serve``, which starts a server for it and runs
``vllm bench serve`` with each number of clients. Without pandas it fails once all is saved."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_ssd.tools.check.findings import say
from vllm_ssd.tools.port import held_port
from vllm_ssd.tools.tune.candidates import Candidate, Outcome

END_S = 60.0  # seconds in which vLLM's sweep ends its server
PROMPTS, CLIENTS = "prompts.jsonl", "clients.json"  # files in the folder of results


def measure(candidate: Candidate, args: Namespace, further: Sequence[str], folder: Path) -> Outcome:
    """Measure what has no result yet; return the figures by number of clients, or none if some are
    missing after ``--limit``. args: the command's options. further: arguments of ``vllm serve``.
    folder: for results and logs."""
    results = folder / re.sub(r"[^\w.=]+", "-", candidate.name).strip("-")
    results.mkdir(exist_ok=True)
    if len(_read(results, args)) == len(args.clients):
        say("  measured before")
    else:
        with Path(f"{results}.log").open("wb") as log:
            # In a session of its own it gets SIGINT once, and then ends its server.
            port, port_holder = held_port()
            words = _sweep(candidate, args, further, results, port)
            sweep = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                sweep.wait(args.limit)
        finally:
            sweep.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                sweep.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(sweep.pid, signal.SIGKILL)
            sweep.wait()
            port_holder.close()
    outcome = _read(results, args)
    for clients, figures in outcome.items():
        say(f"  {clients} at once: {figures['output_throughput']:.1f} tokens/s")
    if len(outcome) == len(args.clients):
        return outcome
    say(f"  failed, or not done within --limit: see {results}.log")
    return {}


def _sweep(
    candidate: Candidate, args: Namespace, further: Sequence[str], results: Path, port: int
) -> list[str]:
    """The command that measures a candidate and saves the results in a folder. port: of its
    server."""
    options = candidate.speculative_config(args.speculative_config)
    serve = _vllm("serve", args.target, *further, host="127.0.0.1", port=port)
    serve += [] if options is None else ["--speculative-config", options]
    bench = _vllm(
        *("bench", "serve", "--disable-shuffle"),
        base_url=f"http://127.0.0.1:{port}",
        backend="openai-chat",
        endpoint="/v1/chat/completions",
        dataset_name="custom_image",  # also takes text alone; "custom" needs pandas
        dataset_path=results.parent / PROMPTS,
        custom_output_len=args.tokens,
        temperature=args.temperature,
    )
    return _vllm(
        *("bench", "sweep", "serve", "--resume", "--show-stdout"),
        serve_cmd=shlex.join(serve),
        bench_cmd=shlex.join(bench),
        bench_params=results.parent / CLIENTS,
        after_bench_cmd="true",  # vLLM's own would empty the prefix cache
        server_ready_timeout=int(args.limit),
        num_runs=1,
        output_dir=results.parent,
        experiment_name=results.name,
    )


def _vllm(*words: str, **options: Any) -> list[str]:
    """A command of vLLM; options that are None are left out."""
    given = {
        name.replace("_", "-"): str(value) for name, value in options.items() if value is not None
    }
    pairs = (word for name, value in given.items() for word in (f"--{name}", value))
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *words, *pairs]


def _read(results: Path, args: Namespace) -> Outcome:
    """Return a candidate's results by number of clients."""
    outcome = {}
    for saved in results.glob("*/summary.json"):  # written when the load is done
        (told,) = json.loads(saved.read_text())
        if told["completed"] == args.requests * told["max_concurrency"]:
            outcome[told["max_concurrency"]] = told
    return {clients: outcome[clients] for clients in args.clients if clients in outcome}
