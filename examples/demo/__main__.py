"""`make demo`: the same questions for plain vLLM and for vLLM with SSD, on the same two cores.

Both engines run at the same time and answer in turns, one while the other idles; a table then tells
what SSD gained. All answers must be equal, token by token, or the exit status is 1. Nothing is
needed but the installation: the models are built.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from examples.demo import report
from examples.demo.engine import EngineSpec, Piece
from examples.demo.models import ensure_models
from examples.demo.plan import DRAFT_DTYPES, DRAFT_ROWS, KS, Costs, Plan, best_plan
from examples.demo.probe import Job, step_seconds
from examples.demo.side import EngineFailed, Side, Turn
from vllm_ssd.lifecycle.cores import available_cores, parse_cores, split_cores

QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a fox and a river.",
    "What are three tips for learning to cook?",
)
MAX_TOKENS = 56
TURNS = 3  # of each engine
LIMIT_S = 330.0  # of the whole demo: no turns begin that would end later, but for the first ones
NUM_CORES = 2
MODELS_ARE = """\
The target is a stand-in: it computes the same function as SmolLM2-135M-Instruct, at the cost of
a model of 1 B parameters. The draft is SmolLM2-135M-Instruct without its layer 3. What they say
is a real small model's text, and the draft's mistakes are real; the target's size is for show.
Both engines run the target in float32, as in 16 bits a step over several rows may round to another
text than a step over one, and decode greedily."""
COUNTED = "tokens/s counts decoding only: what came after the first token of each answer."


def main() -> int:
    """The exit status: 1 if the answers differ or an engine failed."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path(".models"), help="where models go")
    parser.add_argument("--cores", type=parse_cores, help='for example "0-1"; default: two cores')
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS, help="the longest answer")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each engine, 1 at least")
    args = parser.parse_args()
    if args.turns < 1 or args.tokens < 2:
        parser.error("a turn is the least, with answers of 2 tokens: write --turns 3 --tokens 56")
    started = time.monotonic()
    cores = args.cores or separate_cores(available_cores())[:NUM_CORES]
    if len(cores) < NUM_CORES:
        parser.exit(1, "the demo needs two cores: one for the target and one for the draft\n")
    console = Console(highlight=False)
    try:
        os.sched_setaffinity(0, cores)  # every process of the demo inherits it
        deadline = started + LIMIT_S
        parting = compare(console, args.models, cores, args.tokens, args.turns, deadline)
    except EngineFailed as failure:
        print(failure)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"Identical text: {'yes' if parting is None else 'no, ' + parting}")
    console.print(f"The demo took {time.monotonic() - started:.0f} s.")
    return 0 if parting is None else 1


def compare(
    console: Console,
    models: Path,
    cores: Sequence[int],
    max_tokens: int,
    turns: int,
    deadline: float,
) -> str | None:
    """Build the models, ask both engines in turns and say what came out; in words, where answers
    part, or None. deadline: on the monotonic clock, in seconds; the first turns do not heed it."""
    target, draft = ensure_models(console, models)
    console.print(f"\n{MODELS_ARE}\n", soft_wrap=True)
    split = split_cores(cores, 1, None, None)
    own = parse_cores(split.target or "0")
    with console.status("measuring what steps cost here"):
        costs = measure(target, draft, cores, own, split.draft)
    plan = best_plan(costs)
    console.print(*costs_in_words(costs, plan, len(cores)), sep="\n", soft_wrap=True)
    # vLLM's own choice would leave one of two cores to its other processes: 40% slower here.
    all_cores = ",".join(map(str, cores))
    plain_spec = EngineSpec(target, None, environment(all_cores), models / "demo-plain.log")
    options = {**plan.options(), "model": str(draft)}
    ssd_spec = EngineSpec(target, options, environment("auto"), models / "demo-ssd.log")
    # vLLM leaves some shared memory to Python to remove, which would warn of it at the very end.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    titles = (
        f"plain vLLM on cores {all_cores}",
        f"vLLM with SSD (k={plan.k}, f={plan.f}), target on core {split.target}, "
        f"draft on {','.join(map(str, split.draft))}",
    )
    with ExitStack() as stack:
        sides = []
        for title, spec in zip(titles, (plain_spec, ssd_spec)):
            with console.status(f"starting {title}, which takes half a minute"):
                side = stack.enter_context(Side(spec, QUESTIONS, max_tokens, cores))
                side.wait_ready()
            sides.append(side)
        begun = now = time.monotonic()
        for number in range(turns):
            if number > 0 and now + (now - begun) / number > deadline:
                console.print("This machine is slow today: the other turns are left out.")
                break
            for title, side in zip(titles, sides):
                turn = answered(console, title, side, number)
                console.print(f"turn {number + 1}: {turn.tokens_per_second:.1f} tokens/s")
            now = time.monotonic()
    plain, ssd = (side.turns for side in sides)
    console.print("", report.table(plain, ssd), "")
    console.print(report.verdict(plain, ssd, plan), soft_wrap=True)
    console.print(COUNTED, soft_wrap=True)
    return report.same_text([*plain, *ssd])


def answered(console: Console, title: str, side: Side, number: int) -> Turn:
    """A turn of a side: its text is shown the first time, later ones would repeat it."""
    if number > 0:
        with console.status(title):
            return side.take_turn(lambda piece: None)
    console.print()
    console.print(Rule(title, align="left"))
    begun: set[int] = set()

    def show(piece: Piece) -> None:
        if piece.question not in begun:
            begun.add(piece.question)
            console.print(f"\n\n> {QUESTIONS[piece.question]}", style="bold")
        console.out(piece.text, end="", highlight=False)

    turn = side.take_turn(show)
    console.print("\n")
    return turn


def measure(
    target: Path, draft: Path, cores: Sequence[int], own: Sequence[int], drafts: Sequence[int]
) -> Costs:
    """What steps cost on all cores, on the target's own and on the draft's."""
    verified = (1, *(k + 1 for k in KS))
    return Costs(
        step_seconds(Job(target, "float32", tuple(cores), (1,)))[1],
        step_seconds(Job(target, "float32", tuple(own), verified)),
        {
            dtype: step_seconds(Job(draft, dtype, tuple(drafts), tuple(DRAFT_ROWS)))
            for dtype in DRAFT_DTYPES
        },
    )


def costs_in_words(costs: Costs, plan: Plan, cores: int) -> list[str]:
    """What was measured and what is chosen by it."""
    rows = plan.k + 1
    draft = costs.draft[plan.draft_dtype]
    return [
        "Measured, in the matrix products of a step:",
        f"  plain vLLM on {cores} cores, 1 row        {costs.plain * 1000:6.0f} ms",
        f"  the target on its own, 1 row       {costs.target[1] * 1000:6.0f} ms",
        f"  the target on its own, {rows} rows      {costs.target[rows] * 1000:6.0f} ms",
        f"  the draft in {plan.draft_dtype:<8}, {rows * plan.f:>2} rows    "
        f"{draft[rows * plan.f] * 1000:6.0f} ms",
        f"so k={plan.k}, f={plan.f} and a draft in {plan.draft_dtype} should gain the most.",
    ]


def environment(bind: str) -> dict[str, str]:
    """What an engine is told by its environment. bind: the cores of the target's threads."""
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind}


def separate_cores(available: Sequence[int]) -> list[int]:
    """One logical CPU of each physical core."""
    cores: dict[str, int] = {}
    for cpu in available:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


if __name__ == "__main__":
    sys.exit(main())
