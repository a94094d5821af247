"""The command line."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import (
    SMALL,
    add_engine_arguments,
    chosen_from,
    numbers,
    reals,
)
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.datasets import BUILT_IN, NAMES
from benchmarks.serving.records import KINDS
from benchmarks.serving.sweeps import PASSAGE_TOKENS, QUICK, SLACK_TOKENS, SWEEPS

BOUNDS = ("ttft", "tpot", "e2el")
_QUICK: dict[str, Any] = {
    **SMALL,
    "k": [3],
    "f": [1],
    "tokens": 12,
    "requests": 4,
    "requests_per_client": 2,
    "max_model_len": 256,
}


def parse(arguments: Sequence[str] | None, about: str | None) -> argparse.Namespace:
    """The command line, with the defaults of its sweep; ends the process if it is not to be
    understood. about: what the program does."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=about)
    add = parser.add_argument
    add("sweep", nargs="?", choices=list(SWEEPS), default="concurrency", help="what is varied")
    add("--quick", action="store_true", help="tiny defaults for everything, for a CPU")
    clients = chosen_from(list(CLIENTS), "clients")
    add("--client", type=clients, default=["vllm"], help="vllm, sglang, own or several of them")
    kinds = chosen_from(KINDS, "sides")
    add("--sides", type=kinds, default=list(KINDS), help=f"default: {','.join(KINDS)}")
    add_engine_arguments(parser)
    add("--tps", type=numbers, help="several --tp; those that need more GPUs are left out")
    add("--drafts", nargs="+", help="several --draft")
    add("--k", type=numbers, default=[7], help="of ssd, each with every f")
    add("--f", type=numbers, default=[3], help="of ssd, each with every k")
    add("--other-k", type=numbers, default=[3], help="of draft_model, ngram and eagle3")
    add("--eagle3", metavar="HEAD", help="folder or hub name of a head; without it no such side")
    add("--quantisation", default="fp8", help="of ssd-quantised's draft, as vLLM names it")
    names = ",".join((BUILT_IN, *NAMES))
    add(
        "--dataset", type=lambda text: text.split(","), default=[BUILT_IN], help=f"{names}; or FILE"
    )
    add("--all", action="store_true", help="all data sets that can be had")
    add("--concurrency", type=numbers, default=[16], help="requests at a time; 0: any number")
    add("--rates", type=reals, default=[math.inf], help="requests a second, Poisson; inf: at once")
    add("--seconds", type=float, default=60.0, help="that each rate lasts")
    add("--requests", type=int, default=8, help="of a load, at least")
    add("--requests-per-client", type=int, default=4, help="for each place, at least")
    add("--tokens", type=int, default=256, help="of every answer")
    add("--prompt-tokens", type=numbers, help="default: 128 of passages; the data set's own")
    add("--repeats", type=int, default=1, help="times that every load is measured")
    add("--temperatures", type=reals, default=[0.0], help="of sampling, as in 0,0.7")
    add(
        "--goodput", type=_bound, nargs="+", default=[], help="bounds in ms, as in ttft:500 tpot:50"
    )
    together = "start all sides at once, on the GPUs that each kind of side is given"
    place: dict[str, Any] = {"type": _place, "nargs": "+", "metavar": "KIND=GPU,.."}
    add(
        "--together",
        default=[],
        help=together + ", and measure every load on one after the other",
        **place,
    )
    add("--side-timeout", type=float, default=900.0, help="seconds that a server may take to start")
    add("--timeline", action="store_true", help="watch one more request of each side of ssd's")
    add("--json", type=Path, help="where to save all figures")
    asked = parser.parse_known_args(arguments)[0]
    parser.set_defaults(**SWEEPS[asked.sweep])
    if asked.quick:
        parser.set_defaults(**{**_QUICK, **QUICK[asked.sweep]})
    args = parser.parse_args(arguments)
    args.tps = args.tps or [args.tp]
    args.drafts = args.drafts or [args.draft]
    args.all = args.all or (args.sweep == "data" and args.dataset is None)
    args.dataset = list(NAMES) if args.all else args.dataset or [BUILT_IN]
    if args.together and (missing := set(args.sides) - {kind for kind, _ in args.together}):
        parser.error(f"--together says nothing of {', '.join(sorted(missing))}")
    needed = max(args.prompt_tokens or [PASSAGE_TOKENS]) + args.tokens + SLACK_TOKENS
    if needed > args.max_model_len:
        parser.error(f"these prompts and answers need --max-model-len {needed} or more")
    return args


def _place(text: str) -> tuple[str, str]:
    kind, _, gpus = text.partition("=")
    if kind not in KINDS or not all(gpu.isdecimal() for gpu in gpus.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a kind of side and its GPUs: plain=0,1")
    return kind, gpus


def _bound(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        if name in BOUNDS:
            return name, float(limit)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not {'|'.join(BOUNDS)}:MILLISECONDS")
