"""What a benchmark of servers is about: a target, a draft and the arguments of all engines."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.common.about import about_run
from benchmarks.common.arguments import engine_arguments
from benchmarks.common.gpus import visible_gpus
from benchmarks.common.models import Model, find_model


class Subject(NamedTuple):
    """gpus: names of the visible ones, and the memory that is taken of each; engine: as
    `engine_arguments` has it; about: what readers of its figures must know, in markdown."""

    target: Model
    draft: Model
    gpus: list[tuple[str, int]]
    engine: dict[str, Any]
    about: str


def find_subject(module: str, arguments: Sequence[str] | None, args: argparse.Namespace) -> Subject:
    """Of a command line with `add_engine_arguments`; prints what it is about. module, arguments: as
    for `about_run`."""
    target = find_model(args.target, args.models, args.dtype, positions=args.max_model_len)
    draft = find_model(args.draft, args.models, args.dtype, args.drop, args.max_model_len)
    gpus = visible_gpus()
    engine = engine_arguments(args, target, draft, bool(gpus))
    about = about_run(module, arguments, [name for name, _ in gpus], engine)
    about |= {"target": target.about, "draft": draft.about}
    told = "\n".join(f"* {name}: {text}" for name, text in about.items()) + "\n"
    print(told, flush=True)
    return Subject(target, draft, gpus, engine, told)
