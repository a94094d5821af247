"""Plain vLLM, vLLM's own speculation, ours, and ours without its draft, on the same prompts, one
after the other.

Prints a markdown table. Requests run in a closed loop: exactly a batch of them at a time. tokens/s
is of the time in which the batch is full, later prefills included; ms/round is the mean time of the
engine steps in which every request decodes. Every text has a length of its own, the same on each
side, and ends only there, so that texts are comparable and may be poor. Engines have vLLM's own
defaults, so that prompts that come again are cached.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.common.about import about_run
from benchmarks.common.arguments import (
    SMALL,
    add_engine_arguments,
    chosen_from,
    combinations,
    engine_arguments,
    numbers,
    reals,
)
from benchmarks.common.gpus import visible_gpus
from benchmarks.common.models import Model, find_model
from benchmarks.common.records import Kind, Load
from benchmarks.common.sides import Plan
from benchmarks.offline.run import run_together
from benchmarks.offline.saved import read_results, save_results
from benchmarks.offline.table import make_rows, markdown
from benchmarks.standin.folders import say

# All sides that a CPU has, in a few minutes on two cores; the figures mean nothing.
QUICK: dict[str, Any] = {
    **SMALL,
    "batch_sizes": [2],
    "k": [3],
    "f": [1],
    "draft_model_k": [3],
    "tokens": 12,
    "requests": 2,
    "prompt_tokens": 48,
    "max_model_len": 256,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a side failed."""
    args = _parse(arguments)
    target = find_model(args.target, args.models, args.dtype)
    draft = find_model(args.draft, args.models, args.dtype, args.drop)
    before = visible_gpus()
    plan = _plan(args, target, draft, bool(before))
    sides = plan.sides()
    names = [name for name, _ in before]
    about = about_run("benchmarks.offline", arguments, names, plan.engine)
    about |= {"target": target.about, "draft": draft.about}
    logs = args.logs or Path(tempfile.mkdtemp(prefix="ssd-benchmark-"))
    logs.mkdir(parents=True, exist_ok=True)
    say(f"{len(sides)} sides; their logs are in {logs}")
    results = [result for path in args.join for result in read_results(path)]
    for at in range(0, len(sides), args.together):
        if results and before:
            visible_gpus([used for _, used in before])
        for result in run_together(sides[at : at + args.together], logs, args.side_timeout):
            results.append(result)
            if args.json is not None:  # now, as the machine may be gone before the last
                save_results(args.json, about, results)
    failed = [result for result in results if result.error is not None]
    print("\n".join(f"* {name}: {text}" for name, text in about.items()))
    print(f"\n{markdown(make_rows(results), failed)}")
    return 1 if failed else 0


def _plan(args: argparse.Namespace, target: Model, draft: Model, on_gpus: bool) -> Plan:
    return Plan(
        engine=engine_arguments(args, target, draft, on_gpus),
        draft=draft.path,
        tensor_parallel=args.tp,
        on_gpus=on_gpus,
        load=Load(
            args.batch_sizes,
            args.requests,
            args.tokens,
            args.prompt_tokens,
            args.temperatures,
            args.requests_per_place,
        ),
        kinds=args.sides,
        draft_model=args.draft_model_k,
        sd=args.sd_k or args.k,
        ssd=[(k, f) for k in args.k for f in args.f],
        options=combinations(args.option),
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=__doc__)
    add = parser.add_argument
    kinds = get_args(Kind)
    add("--quick", action="store_true", help="tiny defaults for everything, for tests on a CPU")
    add_engine_arguments(parser)
    add("--batch-sizes", type=numbers, default=[1, 4, 8, 16])
    add("--requests", type=int, default=4, help="at least, a batch size")
    add("--requests-per-place", type=int, default=2, help="at least, for each place in the batch")
    add("--tokens", type=int, default=256, help="output tokens of a request, on average")
    add("--prompt-tokens", type=int, default=128)
    add("--temperatures", type=reals, default=[0.0], help="of sampling, as in 0,0.6,1")
    told = f"default: {','.join(kinds)}; may be ''"
    add("--sides", type=chosen_from(kinds, "sides"), default=list(kinds), help=told)
    add("--k", type=numbers, default=[7], help="of ssd, each with every f")
    add("--f", type=numbers, default=[3], help="of ssd, each with every k")
    add("--sd-k", type=numbers, help="of ours with f=0; default: those of ssd")
    add("--draft-model-k", type=numbers, default=[3, 5], help="of vLLM's draft_model")
    add("--together", type=int, default=1, help="engines that start at once; measured in turns")
    add("--side-timeout", type=float, default=1200.0, help="seconds after which a side has failed")
    add("--json", type=Path, help="where to save all figures and texts")
    add("--join", type=Path, action="append", default=[], help="a file saved before, to add to")
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # Asked to end, it takes the engine down that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
