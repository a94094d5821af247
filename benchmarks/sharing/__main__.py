"""Engines on GPUs of their own that share one draft, and EAGLE-3 beside them, per GPU.

    python -m benchmarks.sharing --engines 3 --target 8192,45,64,8,128,28672

The engines have a GPU each, and the draft (`vllm-ssd draft`) the next one; on CPUs, core 0 is the
engines' and core 1 the draft's. The sides take turns under every load, with the same prompts:

  shared by 3      the clients of all engines at once
  one              the clients of the first engine, while the others have none
  eagle3 given N   the clients of an engine with a head without weights, whose rounds have N tokens

The EAGLE-3 engine is on the last GPU, beside the draft if that is there, which is idle then. Both
fit with an --option draft_kv_cache_gib=16 and --gpu-memory-utilization 0.75, as an example.
Replicas are independent, so its figures per GPU are those of any number. It starts when the draft
has measured its GPU. Each further --accepted starts once the one before has had all loads.

Tokens/s are summed over engines, each with the seconds that its own clients took.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common.arguments import add_engine_arguments, log_folder, numbers, reals
from benchmarks.common.draft_server import DraftServer, service_words
from benchmarks.common.server import Server
from benchmarks.common.sides import engine_environment
from benchmarks.common.subject import Subject, find_subject
from benchmarks.serving.arguments import loads
from benchmarks.serving.datasets import BUILT_IN, find_dataset
from benchmarks.serving.measure import Measure, Started
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.records import Result, Side
from benchmarks.serving.table import markdown
from benchmarks.standin.folders import say
from benchmarks.standin.head import head_options, write_head
from vllm_ssd.config.draft_server import FLAGS

NAME = "sharing-benchmark"
_RESERVE_S = 40.0  # of --limit: for a load, and the end of all servers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a side failed or had no time."""
    began = time.monotonic()
    args = _parse(arguments)
    subject = find_subject("benchmarks.sharing", arguments, args)
    if 0 < len(subject.gpus) <= args.engines:
        sys.exit(
            f"benchmarks.sharing: {args.engines} engines and a draft need {args.engines + 1} GPUs, "
            f"and there are {len(subject.gpus)}: write a smaller number of --engines"
        )
    if args.accepted and not subject.gpus:
        say("EAGLE-3 is left out: vLLM gives no acceptance on CPUs")
        args.accepted = []
    results: list[Result] = []
    if args.table is not None:
        args.table.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as ends:
        # A process for each engine's clients: a single one would read messages late.
        clients = ends.enter_context(ProcessPoolExecutor(args.engines, get_context("fork")))
        datasets = {name: find_dataset(name, 1) for name in args.dataset}
        tokenizer = AutoTokenizer.from_pretrained(subject.target.path)
        measure = Measure(
            clients=["own"],
            loads=loads(args),
            prompts=Prompts(tokenizer, datasets, args.max_model_len - args.tokens),
            tokenizer=subject.target.path,
            start_s=args.start_timeout,
            until=began + args.limit - _RESERVE_S,
            same_prompts=True,
            map=clients.map,
        )
        starter = _Starter(args, subject)
        sides = starter.start_ours(ends)
        for tokens in args.accepted or [None]:
            with ExitStack() as its_end:
                if tokens is not None:
                    sides.append(starter.start_eagle3(its_end, tokens))
                ended = results
                for now in measure.started(sides):
                    results = [*ended, *now]
                    if args.table is not None:  # now, as the machine may be gone before the end
                        table = markdown(results, per_gpu=True)
                        args.table.write_text(f"{subject.about}\n{table}\n")
            sides = []
        print(markdown(results, per_gpu=True), flush=True)
    return int(any(result.error is not None for result in results))


class _Starter:
    """Starts servers, which end with the stack that is given."""

    def __init__(self, args: argparse.Namespace, subject: Subject):
        self._args, self._subject = args, subject
        self._logs = log_folder(args)

    def start_ours(self, ends: ExitStack) -> list[Started]:
        """Returns when the draft is loaded; the engines still start."""
        args, on_gpus = self._args, bool(self._subject.gpus)
        given = {"k": args.k, "f": args.f, **dict(args.option)}
        options = {name: value for name, value in given.items() if value is not None}
        requests, device = args.engines * max(args.concurrency), "0" if on_gpus else "1"
        draft = self._subject.draft
        words = service_words(draft, NAME, device, requests, args.dtype, options)
        service = DraftServer(words, self._logs / "draft.log", self._environment(args.engines))
        ends.callback(service.end)
        service.wait_named(NAME, args.start_timeout)
        speculation = {name: value for name, value in options.items() if name not in FLAGS}
        speculation |= {"method": "ssd", "draft_server": NAME}
        engines = [self._server(f"engine-{gpu}", gpu, speculation) for gpu in range(args.engines)]
        ends.callback(_end, engines)
        service.wait_loaded(args.start_timeout)
        say("the draft is loaded")
        told = {"speculative_config": speculation}
        shared = Side(f"shared by {args.engines}", "ssd", on_gpus * (args.engines + 1), told, {})
        one = Side("one", "ssd", on_gpus * 2, told, {})
        return [Started(shared, engines), Started(one, engines[:1])]

    def start_eagle3(self, end: ExitStack, tokens: float) -> Started:
        """tokens: those that a round is given."""
        head = write_head(Path(self._subject.target.path), self._args.models)
        speculation = {"method": "eagle3", "model": str(head), **head_options(tokens)}
        speculation["num_speculative_tokens"] = self._args.other_k
        server = self._server(f"eagle3-{tokens:g}", len(self._subject.gpus) - 1, speculation)
        end.callback(_end, [server])
        told = {"speculative_config": speculation}
        return Started(Side(f"eagle3 given {tokens:g}", "eagle3", 1, told, {}), [server])

    def _server(self, name: str, gpu: int, speculation: dict[str, Any]) -> Server:
        engine = {**self._subject.engine, "speculative_config": speculation}
        return Server(engine, self._logs / f"{name}.log", self._environment(gpu))

    def _environment(self, gpu: int) -> dict[str, str]:
        on_gpus = bool(self._subject.gpus)
        if not on_gpus:
            return engine_environment(False, True, 1) | {"VLLM_CPU_OMP_THREADS_BIND": "0"}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        place = visible.split(",")[gpu] if visible else str(gpu)
        return engine_environment(True, True, 1) | {"CUDA_VISIBLE_DEVICES": place}


def _end(servers: Sequence[Server]) -> None:
    """All at once, as each takes its time. One that takes too long is killed."""
    with ThreadPoolExecutor(len(servers)) as threads, suppress(subprocess.TimeoutExpired):
        list(threads.map(Server.end, servers))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engines", type=int, default=3)
    add_engine_arguments(parser)
    add("--k", type=int, help="default: ssd's own")
    add("--f", type=int, help="default: ssd's own")
    add("--accepted", type=reals, default=[3.5, 4.8], help="tokens a round that EAGLE-3 is given")
    add("--other-k", type=int, default=5, help="of EAGLE-3")
    add("--loads", dest="concurrency", type=numbers, default=[1, 4, 16, 64], help="clients of each")
    add("--temperatures", type=reals, default=[0.0], help="as in 0,0.7")
    add("--dataset", nargs=1, default=[BUILT_IN], help=f"{BUILT_IN} or FILE.jsonl")
    add("--requests", type=int, default=6, help="of a load, at least")
    add("--requests-per-client", type=int, default=3, help="at least")
    add("--tokens", type=int, default=200, help="of every answer")
    add("--start-timeout", type=float, default=900.0, help="seconds that a start may take")
    limit = f"seconds in which all is to be over; no load begins in the last {_RESERVE_S:g}"
    add("--limit", type=float, default=float("inf"), help=limit)
    add("--table", type=Path, help="file for the table, written after every load")
    parser.set_defaults(prompt_tokens=None, repeats=1, turns=1)
    args = parser.parse_args(arguments)
    if args.tp != 1:
        parser.error("--tp must be 1 here: each engine has one GPU")
    return args


if __name__ == "__main__":
    # Asked to end, it takes all servers down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
