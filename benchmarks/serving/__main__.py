"""Plain vLLM, vLLM's own speculation and ssd as users run them and measure them: `vllm serve` with
its default settings, one side after the other or side by side, under a client that everybody has.

    python -m benchmarks.serving [concurrency|data]

Prints a markdown table with the ratios between all sides measured; --json saves every figure.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.common.about import about_run
from benchmarks.common.arguments import combinations, engine_arguments, log_folder
from benchmarks.common.gpus import visible_gpus
from benchmarks.common.models import find_model
from benchmarks.serving.arguments import SLACK_TOKENS, STANDIN, loads, parse
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.datasets import Dataset, find_dataset
from benchmarks.serving.measure import Measure
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.records import Result, Saved, Side
from benchmarks.serving.sides import Plan
from benchmarks.serving.table import markdown
from benchmarks.standin.folders import say
from benchmarks.standin.head import write_head


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a side failed, 2 if it was refused."""
    args = parse(arguments, __doc__)
    try:
        for client in args.client:
            CLIENTS[client].check()
        found = [find_dataset(name, args.turns) for name in args.dataset]
        datasets = {dataset.name: dataset for dataset in found}
        target = find_model(args.target, args.models, args.dtype, positions=args.max_model_len)
        drafts = [
            find_model(draft, args.models, args.dtype, args.drop, args.max_model_len)
            for draft in args.drafts
        ]
        if args.eagle3 == STANDIN:
            args.eagle3 = str(write_head(Path(target.path), args.models))
        args.dataset = list(datasets)
        prompts = _prompts(target.path, datasets, args)
        for load in loads(args):
            prompts.take(replace(load, requests=1), 0)  # refuses a data set that has none
    except ValueError as error:
        say(f"python -m benchmarks.serving: {error}")
        return 2
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    before = visible_gpus()
    engine = engine_arguments(args, target, drafts[0], bool(before))
    plan = Plan(
        engine=engine,
        kinds=args.sides,
        drafts=drafts,
        k=args.k,
        f=args.f,
        other_k=args.other_k,
        gpus=len(before),
        options=combinations(args.option),
        eagle3=args.eagle3,
        accepted=args.accepted,
    )
    sides = plan.sides()
    about = about_run("benchmarks.serving", arguments, [name for name, _ in before], engine)
    about |= {
        "target": target.about,
        "draft": "; ".join(draft.about for draft in drafts),
        "data": "; ".join(f"{data.name}: {data.about}" for data in datasets.values()),
    }
    if left_out := plan.left_out():
        about["left out"] = "; ".join(left_out)
    measure = Measure(
        clients=args.client,
        loads=loads(args),
        prompts=prompts,
        tokenizer=target.path,
        start_s=args.side_timeout,
    )
    logs = log_folder(args)
    say(f"{len(sides)} sides")
    results: list[Result] = []
    for group in _groups(sides, args.together):
        if results and before:
            visible_gpus([used for _, used in before])
        ended = results
        paths = [logs / f"side-{len(ended) + place}.log" for place in range(len(group))]
        for now in measure.sides(group, paths):
            results = [*ended, *now]
            if args.json is not None:  # now, as the machine may be gone before the last
                args.json.write_bytes(msgspec.json.encode(Saved(about, results)))
    print("\n".join(f"* {name}: {text}" for name, text in about.items()))
    print(f"\n{markdown(results)}")
    return int(any(result.error is not None for result in results))


def _groups(sides: Sequence[Side], together: Sequence[tuple[str, str]]) -> list[list[Side]]:
    """Sides whose servers run at the same time. together: (kind, its GPUs); empty: each side runs
    alone."""
    if not together:
        return [[side] for side in sides]
    gpus = dict(together)
    visible = [{"CUDA_VISIBLE_DEVICES": gpus[side.kind]} for side in sides]
    return [[replace(s, environment=s.environment | its) for s, its in zip(sides, visible)]]


def _prompts(target: str, datasets: dict[str, Dataset], args: argparse.Namespace) -> Prompts:
    from transformers import AutoTokenizer

    longest = args.max_model_len - args.turns * (args.tokens + SLACK_TOKENS) + SLACK_TOKENS
    return Prompts(AutoTokenizer.from_pretrained(target), datasets, longest)


if __name__ == "__main__":
    # Asked to end, it takes the server down that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
