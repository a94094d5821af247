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

from vllm_ssd.tools.check.findings import say
from vllm_ssd.tools.port import held_port
from vllm_ssd.tools.tune.candidates import Candidate, Outcome

END_S = 60.0  # seconds in which vLLM's sweep ends its server
PROMPTS, CLIENTS = "prompts.jsonl", "clients.json"  # files in the folder of results
_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
# The dataset custom_image also takes text alone, and "custom" needs pandas.
_BENCH = "bench serve --disable-shuffle --backend openai-chat --endpoint /v1/chat/completions "
_BENCH += "--dataset-name custom_image"
# After a load, vLLM's sweep would empty the prefix cache.
_SWEEP = "bench sweep serve --resume --show-stdout --num-runs 1 --after-bench-cmd true"


def measure(candidate: Candidate, args: Namespace, further: Sequence[str], folder: Path) -> Outcome:
    """Measure what has no result yet; return the figures by number of clients, or none if some are
    missing after ``--limit``. args: the command's options. further: arguments of ``vllm serve``.
    folder: for results and logs."""
    results = folder / re.sub(r"[^\w.=]+", "-", candidate.name).strip("-")
    results.mkdir(exist_ok=True)
    if len(_read(results, args)) == len(args.clients):
        say("  measured before")
    else:
        _run_sweep(candidate, args, further, results)
    outcome = _read(results, args)
    for clients, figures in outcome.items():
        say(f"  {clients} at once: {figures['output_throughput']:.1f} tokens/s")
    if len(outcome) == len(args.clients):
        return outcome
    say(f"  failed, or not done within --limit: see {results}.log")
    return {}


def _run_sweep(
    candidate: Candidate, args: Namespace, further: Sequence[str], results: Path
) -> None:
    """Let vLLM measure a candidate and save what it finds in a folder, for ``--limit`` seconds."""
    port, port_holder = held_port()
    serve = [*_VLLM, "serve", args.target, *further, "--host", "127.0.0.1", "--port", str(port)]
    if (options := candidate.speculative_config(args.speculative_config)) is not None:
        serve += ["--speculative-config", options]
    bench = [*_VLLM, *_BENCH.split(), f"--base-url=http://127.0.0.1:{port}"]
    bench += [f"--dataset-path={results.parent / PROMPTS}", f"--custom-output-len={args.tokens}"]
    if args.temperature is not None:
        bench.append(f"--temperature={args.temperature}")
    words = [*_VLLM, *_SWEEP.split(), f"--server-ready-timeout={args.limit}"]
    words += [f"--serve-cmd={shlex.join(serve)}", f"--bench-cmd={shlex.join(bench)}"]
    words += [f"--bench-params={results.parent / CLIENTS}", f"--output-dir={results.parent}"]
    words.append(f"--experiment-name={results.name}")
    with Path(f"{results}.log").open("wb") as log, port_holder:
        # In a session of its own it gets SIGINT once, and then ends its server.
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


def _read(results: Path, args: Namespace) -> Outcome:
    """A candidate's results by number of clients."""
    outcome = {}
    for saved in results.glob("*/summary.json"):  # written when the load is done
        (told,) = json.loads(saved.read_text())
        if told["completed"] == args.requests * told["max_concurrency"]:
            outcome[told["max_concurrency"]] = told
    return {clients: outcome[clients] for clients in args.clients if clients in outcome}
