"""A real `vllm serve` with method ssd under a random load: arrivals, lengths, sampling settings,
structured output, disconnects, and if asked for deaths of the draft, or drafts that hang.

First a plain server of the same target answers a pool of prompts greedily. Then the server with
method ssd gets requests for them, and every greedy text, also of requests that were cut short or
aborted, must be the plain server's. Structured output must be what its grammar allows. The exit
status is 1 if a text is wrong, a request failed, one got no token for --stall-limit seconds, or
anything is left after the end.
"""

import argparse
import asyncio
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from transformers import AutoTokenizer

from benchmarks.common.arguments import SMALL, add_engine_arguments, log_folder
from benchmarks.common.draft_server import DraftServer, drafts_named, service_words
from benchmarks.common.gpus import visible_gpus
from benchmarks.common.running import alive, leftovers
from benchmarks.common.server import Server
from benchmarks.common.subject import find_subject
from benchmarks.serving.records import Side
from benchmarks.serving.sides import Plan
from benchmarks.soak.load import Clients, Outcome
from benchmarks.soak.requests import Choice, Question, make_questions, reference_request
from benchmarks.soak.summary import markdown, summarise
from benchmarks.soak.watch import STOPPED_S, Killer, Sample, Stopper, Watch
from benchmarks.standin import environment
from benchmarks.standin.folders import say
from vllm_ssd.config.draft_server import FLAGS
from vllm_ssd.service.cores import available_cores

# For what a server leaves to its draft's keeper. Ray's agents outlive a killed Ray by a minute.
GONE_S = 90.0
BACK_S = 120.0  # for a draft that was killed shortly before the load ended
SERVICE = "soak"  # the name of its drafts
# What the logs say of a draft that died, alone or with its keeper.
LOST = re.compile(r"SSD: the draft is lost|SSD: the draft's keeper is gone, and the draft with it")
MANY_RESTARTS = 10**6  # deaths of our making are no reason to give a draft up
# On two cores.
QUICK: dict[str, Any] = {
    **SMALL,
    "minutes": 0.5,
    "concurrency": 4,
    "k": 3,
    "f": 1,
    "prompts": 8,
    "prompt_tokens": 128,
    "tokens": 64,
    "max_model_len": 160,
    "sample": 2.0,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    args = _parse(arguments)
    target, draft, gpus, engine, _ = find_subject("benchmarks.soak", arguments, args)
    options = {**({"max_restarts": MANY_RESTARTS} if args.kill_every else {}), **dict(args.option)}
    plan = Plan(
        engine=engine,
        kinds=["plain", "ssd"],
        drafts=[draft],
        k=[args.k],
        f=[args.f],
        other_k=[],
        # A server may also have fewer GPUs: its draft is on the target's, or a service's.
        gpus=max(len(gpus), args.tp + 1) if gpus else 0,
        options=[options],
    )
    plain_side, side = plan.sides()
    if args.service:
        options = {"k": args.k, "f": args.f, **options}
        side = _joining(side, options, bool(gpus))
    logs = log_folder(args)
    questions = make_questions(
        AutoTokenizer.from_pretrained(target.path),
        args.seed,
        args.prompts,
        args.prompt_tokens,
        args.tokens,
        args.max_model_len,
    )
    limit_s = args.start_timeout
    log = logs / "plain.log"
    with Server(plain_side.engine, log, plain_side.environment) as server:
        server.wait_healthy(limit_s)
        say("the plain server is up")
        plain = asyncio.run(_reference(args, server, questions))
        processes = server.processes()
        left = _end(server) + _left(lambda: [str(process) for process in alive(processes)])
    if gpus:
        visible_gpus([used for _, used in gpus])
    with ExitStack() as ends:
        service_dirs = []
        if args.service:
            words = service_words(
                draft, SERVICE, args.service, args.concurrency * 2, args.dtype, options
            )
            words += ["--max-model-len", str(args.max_model_len)]
            log = logs / "drafts.log"
            service = DraftServer(words, log, environment())
            ends.callback(service.end)
            service.wait_loaded(limit_s)
            service_dirs = drafts_named(SERVICE)
            say(f"{len(service_dirs)} drafts are up")
        server = ends.enter_context(Server(side.engine, logs / "ssd.log", side.environment))
        server.wait_healthy(limit_s)
        say(f"the server with method ssd is up; load for {args.minutes:g} minutes")
        run_dir = server.run_dir()
        assert run_dir is not None
        watch = Watch(server, run_dir, service_dirs)
        rng = random.Random(args.seed)
        killer = _killer(args, watch, rng)
        try:
            outcome, samples = asyncio.run(
                _soak(args, server, watch, killer, questions, plain, rng)
            )
        finally:
            killer.end()
        draft_back = _wait(killer.draft_lives, BACK_S if killer.at else 0.0)
        left += _end(server)
    seen = list(watch.seen.values())
    left += _left(
        lambda: [one for each in (run_dir, *service_dirs) for one in leftovers(each, seen)]
    )
    required = args.compare == "require"
    said = [logs / "ssd.log", *([logs / "drafts.log"] if args.service else [])]
    lost = sum(len(LOST.findall(log.read_text(errors="replace"))) for log in said)
    died = max(0, lost - (0 if args.stop_every else len(killer.at)))
    summary = summarise(outcome, samples, killer.what, killer.at, died, draft_back, left, required)
    print(markdown(summary))
    if args.json is not None:
        record = {"summary": summary, "samples": samples}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    return 1 if summary.problems else 0


async def _reference(
    args: argparse.Namespace, server: Server, questions: Sequence[Question]
) -> list[Choice]:
    requests = [reference_request(*numbered) for numbered in enumerate(questions)]
    async with Clients(server.url, args.stall_limit) as clients:
        return await clients.ask_all(requests, args.concurrency)


async def _soak(
    args: argparse.Namespace,
    server: Server,
    watch: Watch,
    killer: Killer,
    questions: Sequence[Question],
    plain: Sequence[Choice],
    rng: random.Random,
) -> tuple[Outcome, list[Sample]]:
    """The load, what came of it, and what was seen meanwhile."""
    deadline = time.monotonic() + 60 * args.minutes

    def going() -> bool:
        return time.monotonic() < deadline and server.process.poll() is None

    samples = []
    async with Clients(server.url, args.stall_limit) as clients:
        outcome = clients.outcome
        load = asyncio.create_task(clients.soak(rng, questions, plain, args.concurrency, going))
        while not load.done():
            samples.append(await asyncio.to_thread(watch.look, outcome.flow.tokens))
            await asyncio.to_thread(killer.look)
            await asyncio.wait([load], timeout=args.sample)
        samples.append(watch.look(outcome.flow.tokens))
        await load
    return outcome, samples


def _joining(side: Side, options: dict[str, Any], on_gpus: bool) -> Side:
    """The side as one whose engine has its drafts from the service."""
    own = {name: value for name, value in options.items() if name not in FLAGS}
    speculation = {"method": "ssd", "draft_server": SERVICE, **own}
    # On CPUs the last core is the drafts' alone, as far as they want it.
    cores = ",".join(map(str, available_cores()[:-1]))
    told = {} if on_gpus else {"VLLM_CPU_OMP_THREADS_BIND": cores}
    return replace(
        side,
        engine={**side.engine, "speculative_config": speculation},
        environment={**side.environment, **told},
    )


def _killer(args: argparse.Namespace, watch: Watch, rng: random.Random) -> Killer:
    if args.stop_every:
        return Stopper(watch, args.stop_every, rng)
    return Killer(watch, args.kill_every or float("inf"), rng)


def _end(server: Server) -> list[str]:
    """Have a server end; a line about one that does not."""
    try:
        server.end()
    except subprocess.TimeoutExpired:
        return ["the server, which did not end and was killed"]
    return []


def _left(find: Callable[[], list[str]]) -> list[str]:
    """What is still there some time after the end."""
    _wait(lambda: not find(), GONE_S)
    return find()


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it holds, now or within that time."""
    deadline = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return holds


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny defaults for everything, for tests on a CPU")
    add("--minutes", type=float, default=15.0, help="under load; starts and ends are extra")
    add_engine_arguments(parser)
    add("--k", type=int, default=7)
    add("--f", type=int, default=3)
    add("--concurrency", type=int, default=16, help="clients; each pauses between its requests")
    add("--prompts", type=int, default=24, help="in the pool")
    add("--prompt-tokens", type=int, default=512, help="of the longest prompt")
    add("--tokens", type=int, default=256, help="of the longest answer")
    add("--seed", type=int, default=0)
    harm = parser.add_mutually_exclusive_group()
    harm.add_argument(
        "--kill-every",
        type=float,
        metavar="SECONDS",
        help="in the mean: kill the draft server, its keeper or its Ray, which are started again "
        "each time unless --option says otherwise; default: never",
    )
    harm.add_argument(
        "--stop-every",
        type=float,
        metavar="SECONDS",
        help=f"in the mean: stop the engine's draft server with SIGSTOP for {STOPPED_S:g} s, as if "
        "it hung; default: never",
    )
    add(
        "--service",
        metavar="DEVICES",
        help="drafts come from a `vllm-ssd draft --device DEVICES`: one, or as in 0,1 several "
        "(on CPUs '0|1'); default: the engine starts a draft of its own",
    )
    add(
        "--compare",
        choices=("require", "report"),
        help="whether greedy texts must be the plain server's; default: in float32 only, as in 16 "
        "bits the order of sums decides near ties",
    )
    add("--stall-limit", type=float, default=60.0, help="seconds without a token that fail")
    add("--sample", type=float, default=5.0, help="seconds between two looks at the processes")
    add("--start-timeout", type=float, default=600.0, help="seconds for a server's start")
    add("--json", type=Path, help="where to save all figures")
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(arguments)
    args.compare = args.compare or ("require" if args.dtype == "float32" else "report")
    return args


if __name__ == "__main__":
    # Asked to end, it takes the server down that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
