"""The command line, and the loads that follow from it."""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import SMALL, add_engine_arguments, chosen_from, numbers, reals
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.datasets import BUILT_IN, FOLDER
from benchmarks.serving.records import KINDS, Load

PASSAGE_TOKENS = 128  # of a prompt made of passages, unless said otherwise
SLACK_TOKENS = 64  # by which prompts, or answers in a history, may be longer than asked for
STANDIN = "standin"  # in place of a head's name
# What is special about a sweep.
SWEEPS: dict[str, dict[str, Any]] = {
    "concurrency": {"concurrency": [1, 2, 4, 8, 16, 32, 64, 128, 256]},
    "data": {"concurrency": [1, 16], "max_model_len": 4096},
}
_QUICK: dict[str, Any] = {
    **SMALL,
    "sides": ["plain", "draft_model", "ngram", "ssd"],
    "concurrency": [1, 2],
    "k": [3],
    "f": [1],
    "tokens": 12,
    "requests": 4,
    "requests_per_client": 2,
}


def parse(arguments: Sequence[str] | None, about: str | None) -> argparse.Namespace:
    """The command line, with the defaults of its sweep; ends the process if it is not to be
    understood. about: what the program does."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=about)
    add = parser.add_argument
    add("sweep", nargs="?", choices=list(SWEEPS), default="concurrency", help="what is varied")
    add("--quick", action="store_true", help="tiny defaults for everything, for a CPU")
    clients = chosen_from(list(CLIENTS), "clients")
    add("--client", type=clients, default=["vllm"], help="vllm, own or both")
    kinds = chosen_from(KINDS, "sides")
    add("--sides", type=kinds, default=[*KINDS], help=f"default: {','.join(KINDS)}")
    add_engine_arguments(parser)
    add("--drafts", nargs="+", help="several --draft")
    add("--k", type=numbers, default=[None], help="of ssd, each with every f; default: ssd's own")
    add("--f", type=numbers, default=[None], help="of ssd, each with every k; default: ssd's own")
    add("--other-k", type=numbers, default=[3], help="of draft_model, ngram and eagle3")
    head = f'folder or hub name of a head, or "{STANDIN}"; without it no such side'
    add("--eagle3", metavar="HEAD", help=head)
    given = f"tokens a round that --eagle3 {STANDIN} is given, each a side; default: 2.5,3,3.5"
    add("--accepted", type=reals, default=[2.5, 3.0, 3.5], help=given)
    add(
        "--dataset",
        type=lambda text: text.split(","),
        default=[BUILT_IN],
        help=f"{BUILT_IN}, FILE.jsonl or a folder in ${FOLDER}; or several",
    )
    add("--concurrency", type=numbers, help="requests at a time; 0: any number")
    add("--requests", type=int, default=8, help="of a load, at least")
    add("--requests-per-client", type=int, default=4, help="for each place, at least")
    add("--tokens", type=int, default=256, help="of every answer")
    add("--prompt-tokens", type=numbers, help="default: 128 of passages; the data set's own")
    add("--turns", type=int, default=1, help="of the chat that each request is, with client own")
    add("--repeats", type=int, default=1, help="times that every load is measured")
    add("--temperatures", type=reals, default=[0.0], help="of sampling, as in 0,0.7")
    place: dict[str, Any] = {"type": _place, "nargs": "+", "metavar": "KIND=GPU,.."}
    add(
        "--together",
        default=[],
        help="start all sides at once, on the GPUs that each kind of side is given, and measure "
        "every load on one after the other",
        **place,
    )
    add("--side-timeout", type=float, default=900.0, help="seconds that a server may take to start")
    add("--json", type=Path, help="where to save all figures")
    asked = parser.parse_known_args(arguments)[0]
    parser.set_defaults(**SWEEPS[asked.sweep])
    if asked.quick:
        length = 2048 if asked.sweep == "data" else 256 * asked.turns
        parser.set_defaults(**_QUICK, max_model_len=length)
    args = parser.parse_args(arguments)
    args.drafts = args.drafts or [args.draft]
    if "eagle3" in args.sides and not args.eagle3 and args.sides != [*KINDS]:
        parser.error(f"--sides eagle3 needs a head: --eagle3 HEAD, or --eagle3 {STANDIN}")
    args.accepted = args.accepted if args.eagle3 == STANDIN else []  # else it is measured
    for tokens, k in product(args.accepted, args.other_k):
        if not 1 <= tokens <= k + 1:
            parser.error(f"--accepted {tokens:g}: with k={k} a round has 1 to {k + 1} tokens")
    if args.together and (missing := set(args.sides) - {kind for kind, _ in args.together}):
        parser.error(f"--together says nothing of {', '.join(sorted(missing))}")
    if args.turns > 1 and args.client != ["own"]:
        parser.error("--turns needs --client own, as no other client can chat")
    turn = max(args.prompt_tokens or [PASSAGE_TOKENS]) + args.tokens + SLACK_TOKENS
    if (needed := args.turns * turn) > args.max_model_len:
        parser.error(f"these prompts and answers need --max-model-len {needed} or more")
    return args


def loads(args: argparse.Namespace) -> list[Load]:
    """All loads of a command line, in the order in which they are measured."""
    found = []
    for dataset in args.dataset:
        lengths = args.prompt_tokens or [PASSAGE_TOKENS if dataset == BUILT_IN else None]
        for repeat, tokens, temperature, most in product(
            range(args.repeats), lengths, args.temperatures, args.concurrency
        ):
            requests = max(args.requests, args.requests_per_client * most)
            of_answer = (args.tokens, most or None, tokens, temperature, repeat, args.turns)
            found.append(Load(dataset, requests, *of_answer))
    return found


def _place(text: str) -> tuple[str, str]:
    kind, _, gpus = text.partition("=")
    if kind not in KINDS or not all(gpu.isdecimal() for gpu in gpus.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a kind of side and its GPUs: plain=0,1")
    return kind, gpus
