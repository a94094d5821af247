"""Several servers, and one draft for all of them or one for each, on a GPU of the drafts'.

    python -m benchmarks.sharing --engines 2,4 --target 4096,32,32,8,128,14336 --k 3 --f 3

All servers are on one GPU, among which its memory has to be shared out (--gpu-memory-utilization,
--engine-option kv_cache_memory_bytes=..), and all drafts on another one, or on the same; on CPUs
on core 0 and core 1. Every server has --concurrency clients, and all are asked at the same time.

Sides: plain, own (each engine has a draft), shared (`vllm-ssd draft`), remote (the same on another
node, which is a network namespace of this machine). Only root can have remote. It is measured over
the namespace's network as it is, and then over each --network, where the kernel has netem.

Prints a markdown table of what all clients got together and of what the drafts did. Rounds a glue
are the requests that are drafted for at a time.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common.another_node import Node, another_node, why_not
from benchmarks.common.arguments import add_engine_arguments, log_folder, numbers
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
from benchmarks.standin.folders import say
from vllm_ssd.config.draft_server import FLAGS
from vllm_ssd.metrics import rates, subtract

SIDES = ("plain", "own", "shared", "remote")
NAME = "sharing-benchmark"
PORT = 7400  # on the other node
COLUMNS = (
    *("engines", "drafts", "tokens/s", "x plain", "tokens a round", "hit / miss / late"),
    *("a draft is busy", "rounds a glue", "ms a glue", "ms a step", "round trip, ms"),
)
_OF_TARGETS = ("rounds", "hits", "misses", "late", "wait_us")
_ONE_DRAFT = ("shared", "remote")
_WARM_UP_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; raises what a server or a client fails with."""
    args = _parse(arguments)
    if "remote" in args.sides and (reason := why_not(args.network)):
        sys.exit(f"benchmarks.sharing: {reason}")
    subject = find_subject("benchmarks.sharing", arguments, args)
    logs = log_folder(args)
    print(table_head(COLUMNS), flush=True)
    for count in args.engines:
        plain = 0.0
        for side in args.sides:
            if subject.gpus:
                visible_gpus([used for _, used in subject.gpus])
            with _running(side, count, subject, args, logs) as (servers, node):
                for network in _networks(node, args.network):
                    speed, figures = _measure(servers, subject.target.path, args, side)
                    plain = speed if side == "plain" else plain
                    ratio = f"{speed / plain:.2f}" if plain else "–"
                    drafts = f"{side}, {network}" if network else side
                    print(table_row([str(count), drafts, f"{speed:.0f}", ratio, *figures]))
                    sys.stdout.flush()
    return 0


def _place(args: argparse.Namespace, on_gpus: bool) -> tuple[dict[str, str], str]:
    """What is added to the environments of engines and services, and the drafts' device there."""
    if not on_gpus:
        return {"VLLM_CPU_OMP_THREADS_BIND": "0"}, "1"
    gpus = list(dict.fromkeys([args.target_gpu, args.draft_gpu]))
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}, str(gpus.index(args.draft_gpu))


@contextmanager
def _running(
    side: str, count: int, subject: Subject, args: argparse.Namespace, logs: Path
) -> Iterator[tuple[list[Server], Node | None]]:
    """Healthy servers of a side, and the node of its draft service if that is another one."""
    place, device = _place(args, bool(subject.gpus))
    told = engine_environment(bool(subject.gpus), side != "plain", 1) | place
    drafting = {"k": args.k, "f": args.f, **dict(args.option)}
    with ExitStack() as ends:
        key_file = Path(ends.enter_context(tempfile.TemporaryDirectory()), "drafts.key")
        speculation: dict[str, Any] = {
            "plain": {},
            "own": {"model": subject.draft.path, "draft_device": device, **drafting},
            "shared": {"draft_server": NAME},
            "remote": {"draft_server": NAME, "draft_server_key": str(key_file)},
        }[side]
        node = None
        if side in _ONE_DRAFT:
            # What is about the draft is its service's to say.
            speculation |= {name: value for name, value in args.option if name not in FLAGS}
            requests = count * args.concurrency
            words = service_words(subject.draft, NAME, device, requests, args.dtype, drafting)
            log, limit_s = logs / f"{count}-{side}-drafts.log", args.start_timeout
            if side == "remote":
                node = ends.enter_context(another_node())
                words += ["--listen", f"{node.there}:{PORT}", "--key-file", str(key_file)]
            elsewhere = {"command": node.command} if node else {}
            ends.enter_context(draft_server(words, log, told, limit_s, **elsewhere))
        engine = dict(subject.engine)
        if speculation:
            engine["speculative_config"] = {"method": "ssd", **speculation}
        servers = []
        for number in range(count):
            servers.append(Server(engine, logs / f"{count}-{side}-{number}.log", told))
            ends.callback(servers[-1].end)
        for server in servers:
            server.wait_healthy(args.start_timeout)
        say(f"{count} engines, {side}: all servers are up")
        yield servers, node


def _networks(node: Node | None, networks: Sequence[str]) -> Iterator[str]:
    """The networks to the other node, each once it is there; "" for the network as it is."""
    yield ""
    if node is not None:
        for network in networks:
            node.slow_down(network)
            yield network


def _measure(
    servers: Sequence[Server], tokenizer: str, args: argparse.Namespace, side: str
) -> tuple[float, list[str]]:
    """Tokens a second of all together, and the other cells of the row."""
    requests = args.concurrency * args.requests_per_client
    load = Load(BUILT_IN, requests, args.tokens, args.concurrency, temperature=args.temperature)
    warm_up = Load(BUILT_IN, args.concurrency, _WARM_UP_TOKENS, args.concurrency)
    every = range(len(servers) * (requests + args.concurrency))
    texts = iter(make_texts(AutoTokenizer.from_pretrained(tokenizer), every, args.prompt_tokens))
    _ask_all(servers, warm_up, texts, tokenizer)
    run_dirs = [run_dir for server in servers if (run_dir := server.run_dir())]
    before = [counters(run_dir) for run_dir in run_dirs]
    began = time.monotonic()
    tokens = _ask_all(servers, load, texts, tokenizer)
    seconds = time.monotonic() - began
    counted = [subtract(counters(run_dir), then) for run_dir, then in zip(run_dirs, before)]
    return tokens / seconds, _cells(counted, seconds, side) if counted else [""] * 7


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
    drafts = counted[:1] if side in _ONE_DRAFT else counted

    def total(name: str) -> int:
        return sum(one[name] for one in drafts)

    busy_us = sum(total(f"{work}_us") for work in ("prefill", "glue", "branch"))
    return [
        f"{found['tokens_per_round']:.2f}",
        shares,
        f"{busy_us / 1e6 / seconds / len(drafts):.0%}",
        f"{together['rounds'] / max(total('glue'), 1):.1f}",
        f"{total('glue_us') / 1000 / max(total('glue'), 1):.2f}",
        f"{total('branch_us') / 1000 / max(total('branch'), 1):.2f}",
        f"{max(one['link_us'] for one in counted) / 1000:.2f}" if side == "remote" else "",
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engines", type=numbers, default=[2, 4], help="servers at a time, as in 2,4")
    add("--sides", nargs="+", choices=SIDES, default=SIDES[:3], help="default: all but remote")
    add("--network", nargs="+", default=[], help="as for netem: 'delay 1ms' 'delay 1ms loss 1%%'")
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
    # Asked to end, it takes servers and node down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
