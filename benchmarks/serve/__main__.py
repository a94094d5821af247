"""Plain vLLM, vLLM's own speculation and ssd as users run them: `vllm serve` with its default
settings, and clients that stream over HTTP in a closed loop. One side after the other.

Prints a markdown table with each side's tokens a second, time to the first token and longest gap
between two tokens, beside those of plain vLLM.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.arguments import (
    SMALL,
    add_engine_arguments,
    combinations,
    engine_arguments,
    numbers,
)
from benchmarks.common.gpus import visible_gpus
from benchmarks.common.models import find_model
from benchmarks.common.prompts import make_prompts
from benchmarks.common.server import Server
from benchmarks.common.sides import CPU_ENGINE, engine_environment
from benchmarks.serve.client import Figures, load
from benchmarks.serve.table import markdown
from benchmarks.standin.folders import say

SIDES = ("plain", "draft_model", "ssd")
# In a few minutes on two cores; the figures mean nothing.
QUICK: dict[str, Any] = {
    **SMALL,
    "clients": [1, 2],
    "k": 3,
    "f": 1,
    "tokens": 12,
    "requests": 2,
    "prompt_tokens": 48,
    "max_model_len": 256,
}
_WARM_UP_TOKENS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    args = _parse(arguments)
    target = find_model(args.target, args.models, args.dtype)
    draft = find_model(args.draft, args.models, args.dtype, args.drop)
    before = visible_gpus()
    engine = engine_arguments(args, target, draft, bool(before))
    engine["tensor_parallel_size"] = args.tp
    if not before:
        engine = {**CPU_ENGINE, **engine}
    logs = args.logs or Path(tempfile.mkdtemp(prefix="ssd-serve-"))
    logs.mkdir(parents=True, exist_ok=True)
    sides = _sides(args, draft.path)
    say(f"{len(sides)} sides; their logs are in {logs}")
    prompts = _prompts(target.path, args.prompt_tokens)
    measured: dict[str, list[Figures]] = {}
    for number, (name, speculation) in enumerate(sides.items()):
        if measured and before:
            visible_gpus([used for _, used in before])
        of_side = engine if speculation is None else {**engine, "speculative_config": speculation}
        added = engine_environment(bool(before), name.startswith("ssd"), args.tp)
        server = Server(of_side, logs / f"side-{number}.log", added)
        try:
            server.wait_healthy(args.side_timeout)
            say(f"{name}: server is up")
            measured[name] = _measure(args, server.url, name, prompts)
        finally:
            if server.process.poll() is None:
                server.end()
        if args.json is not None:  # now, as the machine may be gone before the last
            args.json.write_bytes(msgspec.json.encode(measured))
    print(markdown(measured))
    return 0


def _sides(args: argparse.Namespace, draft: str) -> dict[str, dict[str, Any] | None]:
    """Name -> --speculative-config."""
    own = {"method": "draft_model", "model": draft, "num_speculative_tokens": args.draft_model_k}
    ours = {"method": "ssd", "model": draft, "k": args.k, "f": args.f}
    sides: dict[str, dict[str, Any] | None] = {}
    for kind in args.sides:
        if kind == "ssd":
            for further in combinations(args.option):
                told = "".join(f" {name}={value}" for name, value in further.items())
                sides[f"ssd k={args.k} f={args.f}{told}"] = {**ours, **further}
        elif kind == "draft_model":
            sides[f"draft_model k={args.draft_model_k}"] = own
        else:
            sides[kind] = None
    return sides


def _measure(
    args: argparse.Namespace, url: str, name: str, prompts: Sequence[list[int]]
) -> list[Figures]:
    figures = []
    most = max(args.clients)
    load(url, prompts, most, most, _WARM_UP_TOKENS, 0.0)
    for temperature in args.temperatures:
        for clients in args.clients:
            requests = max(args.requests, args.requests_per_client * clients)
            found = load(url, prompts, clients, requests, args.tokens, temperature)
            say(f"{name}: {clients} clients, T {temperature:g}: {found.tokens_s:.1f} tokens/s")
            figures.append(found)
    return figures


def _prompts(target: str, tokens: int) -> list[list[int]]:
    """The first 40 differ; prefixes that later ones share are cached, as vLLM does by default."""
    from transformers import AutoTokenizer

    return make_prompts(AutoTokenizer.from_pretrained(target), 40, tokens)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny defaults for everything, for a CPU")
    add_engine_arguments(parser)
    add("--clients", type=numbers, default=[1, 4, 16, 64, 128], help="at a time, as in 1,16")
    add("--requests", type=int, default=4, help="at least, for each number of clients")
    add("--requests-per-client", type=int, default=2)
    add("--tokens", type=int, default=256, help="of every answer")
    add("--prompt-tokens", type=int, default=128)
    add("--temperatures", type=_reals, default=[0.0], help="of sampling, as in 0,0.7")
    add("--sides", type=_kinds, default=list(SIDES), help=f"default: {','.join(SIDES)}")
    add("--k", type=int, default=7, help="of ssd")
    add("--f", type=int, default=3, help="of ssd")
    add("--draft-model-k", type=int, default=3, help="of vLLM's draft_model")
    add("--side-timeout", type=float, default=900.0, help="seconds that a server may take to start")
    add("--json", type=Path, help="where to save all figures")
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def _reals(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _kinds(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(SIDES):
        raise argparse.ArgumentTypeError(
            f"no such sides: {', '.join(sorted(unknown))}; choose from {', '.join(SIDES)}"
        )
    return chosen


if __name__ == "__main__":
    # Asked to end, it takes the server down that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
