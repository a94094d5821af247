"""Several servers, and one draft for all of them or one for each, on a GPU of the drafts'.

    python -m benchmarks.sharing --engines 2,4 --target 4096,32,32,8,128,14336 --k 3 --f 3

All servers are on one GPU, among which its memory has to be shared out (--gpu-memory-utilization,
--engine-option kv_cache_memory_bytes=..), and all drafts on another one, or on the same; on CPUs
on core 0 and core 1. Every server has --concurrency clients, and all are asked at the same time.
Sides: plain, own (each engine has a draft), shared (`vllm-ssd draft`). Prints a markdown table of
what all clients got together and of what the drafts did; rounds a glue are the requests that are
drafted for at a time.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import add_engine_arguments, numbers
from benchmarks.common.draft_server import draft_server, service_words
from benchmarks.common.gpus import visible_gpus
from benchmarks.common.markdown import table_head, table_row
from benchmarks.common.prompts import make_texts
from benchmarks.common.running import counters
from benchmarks.common.server import Server
from benchmarks.common.sides import engine_environment
from benchmarks.common.subject import Subject, find_subject
from benchmarks.serving.clients.own import OwnClient
from benchmarks.serving.clients.task import Task
from benchmarks.serving.datasets import BUILT_IN
from benchmarks.serving.records import Load
from benchmarks.standin import environment
from benchmarks.standin.folders import say
from vllm_ssd.config.draft_server import FLAGS
from vllm_ssd.metrics import rates, subtract

SIDES = ("plain", "own", "shared")
NAME = "sharing-benchmark"
COLUMNS = (
    *("engines", "drafts", "tokens/s", "x plain", "tokens a round", "hit / miss / late"),
    *("a draft is busy", "rounds a glue", "ms a glue", "ms a step"),
)
_OF_TARGETS = ("rounds", "hits", "misses", "late", "wait_us")
_WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Place:
    """Where targets and drafts are. servers, service: what is added to their environments.
    draft_device, service_device: the drafts' device as an engine names it, and as the service."""

    servers: dict[str, str]
    service: dict[str, str]
    draft_device: str
    service_device: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; raises what a server or a client fails with."""
    args = _parse(arguments)
    subject = find_subject("benchmarks.sharing", arguments, args)
    gpus = subject.gpus
    print(table_head(COLUMNS), flush=True)
    place = _on_gpus(args) if gpus else _on_cpus()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="ssd-sharing-"))
    logs.mkdir(parents=True, exist_ok=True)
    for count in args.engines:
        plain = 0.0
        for side in args.sides:
            if gpus:
                visible_gpus([used for _, used in gpus])
            with _running(side, count, subject, place, args, logs) as servers:
                speed, figures = _measure(servers, subject.target.path, args, side)
            plain = speed if side == "plain" else plain
            ratio = f"{speed / plain:.2f}" if plain else "–"
            print(table_row([str(count), side, f"{speed:.0f}", ratio, *figures]), flush=True)
    return 0


def _on_gpus(args: argparse.Namespace) -> Place:
    both = list(dict.fromkeys([args.target_gpu, args.draft_gpu]))
    return Place(
        servers={"CUDA_VISIBLE_DEVICES": ",".join(both)},
        service={"CUDA_VISIBLE_DEVICES": args.draft_gpu},
        draft_device=str(both.index(args.draft_gpu)),
        service_device="0",
    )


def _on_cpus() -> Place:
    return Place({"VLLM_CPU_OMP_THREADS_BIND": "0"}, {}, "1", "1")


@contextmanager
def _running(
    side: str,
    count: int,
    subject: Subject,
    place: Place,
    args: argparse.Namespace,
    logs: Path,
) -> Iterator[list[Server]]:
    """Healthy servers of a side, and its draft service."""
    engine = subject.engine
    own = {
        "model": subject.draft.path,
        "k": args.k,
        "f": args.f,
        "draft_device": place.draft_device,
    }
    options = {"own": own, "shared": {"draft_server": NAME}}.get(side)
    if options is not None:
        # What is about the draft is its service's to say.
        further = {name: value for name, value in args.option if side == "own" or name not in FLAGS}
        engine = engine | {"speculative_config": {"method": "ssd", **options, **further}}
    told = engine_environment(bool(subject.gpus), side != "plain", 1) | place.servers
    with ExitStack() as ends:
        if side == "shared":
            log = logs / f"{count}-service.log"
            words = service_words(
                subject.draft,
                NAME,
                place.service_device,
                count * args.concurrency,
                args.dtype,
                {"k": args.k, "f": args.f, **dict(args.option)},
            )
            ends.enter_context(
                draft_server(words, log, environment() | place.service, args.start_timeout)
            )
        servers = []
        for number in range(count):
            servers.append(Server(engine, logs / f"{count}-{side}-{number}.log", told))
            ends.callback(servers[-1].end)
        for server in servers:
            server.wait_healthy(args.start_timeout)
        say(f"{count} engines, {side}: all servers are up")
        yield servers


def _measure(
    servers: Sequence[Server], tokenizer: str, args: argparse.Namespace, side: str
) -> tuple[float, list[str]]:
    """Tokens a second of all together, and the other cells of the row."""
    requests = args.concurrency * args.requests_per_client
    load = Load(BUILT_IN, requests, args.tokens, args.concurrency, temperature=args.temperature)
    warm_up = Load(BUILT_IN, args.concurrency, _WARM_UP_TOKENS, args.concurrency)
    texts = _texts(tokenizer, len(servers) * (requests + args.concurrency), args.prompt_tokens)
    _ask_all(servers, warm_up, texts, tokenizer)
    run_dirs = [run_dir for server in servers if (run_dir := server.run_dir())]
    before = [counters(run_dir) for run_dir in run_dirs]
    began = time.monotonic()
    tokens = _ask_all(servers, load, texts, tokenizer)
    seconds = time.monotonic() - began
    counted = [subtract(counters(run_dir), then) for run_dir, then in zip(run_dirs, before)]
    return tokens / seconds, _cells(counted, seconds, side) if counted else [""] * 6


def _texts(tokenizer: str, count: int, tokens: int) -> Iterator[str]:
    from transformers import AutoTokenizer

    return iter(make_texts(AutoTokenizer.from_pretrained(tokenizer), range(count), tokens))


def _ask_all(servers: Sequence[Server], load: Load, texts: Iterator[str], tokenizer: str) -> int:
    """The same load on every server at the same time; how many tokens they said."""
    with ThreadPoolExecutor(len(servers)) as threads:
        asked = []
        for server in servers:
            prompts = [next(texts) for _ in range(load.requests)]
            task = Task(server.url, tokenizer, load, prompts, Path())
            asked.append(threads.submit(OwnClient().measure, task))
        return sum(one.result().tokens for one in asked)


def _cells(counted: Sequence[dict[str, Any]], seconds: float, side: str) -> list[str]:
    """Of what each engine's table counted. A shared draft counts all its work in every table."""
    together: dict[str, Any] = {name: sum(one[name] for one in counted) for name in _OF_TARGETS}
    together["accepted"] = [sum(places) for places in zip(*(one["accepted"] for one in counted))]
    found = rates(together)
    shares = " / ".join(f"{100 * found[kind]:.0f}" for kind in ("hit", "miss", "late"))
    drafts = counted[:1] if side == "shared" else counted

    def total(name: str) -> int:
        return sum(one[name] for one in drafts)

    busy_us = sum(total(f"{work}_us") for work in ("prefill", "glue", "branch", "fallback"))
    return [
        f"{found['tokens_per_round']:.2f}",
        shares,
        f"{busy_us / 1e6 / seconds / len(drafts):.0%}",
        f"{together['rounds'] / max(total('glue'), 1):.1f}",
        f"{total('glue_us') / 1000 / max(total('glue'), 1):.2f}",
        f"{total('branch_us') / 1000 / max(total('branch'), 1):.2f}",
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engines", type=numbers, default=[2, 4], help="servers at a time, as in 2,4")
    add("--sides", nargs="+", choices=SIDES, default=SIDES)
    add_engine_arguments(parser)
    add("--k", type=int, default=3)
    add("--f", type=int, default=3)
    add("--target-gpu", default="0", help="of all targets")
    add("--draft-gpu", default="1", help="of all drafts")
    add("--concurrency", type=int, default=16, help="clients of each server")
    add("--requests-per-client", type=int, default=4)
    add("--tokens", type=int, default=200, help="of every answer")
    add("--prompt-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--start-timeout", type=float, default=900.0, help="seconds that a start may take")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
