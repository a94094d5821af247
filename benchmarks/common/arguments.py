"""What every benchmark's command line says about models and engines."""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.models import SMOLLM2, Model
from benchmarks.standin.build import DTYPES, STANDIN_KEY

# Target and draft that two CPU cores can serve; the draft is the target without one layer. As slow
# as its target, it would not be worth a wait, and none of its drafts be verified.
SMALL: dict[str, Any] = {
    "target": SMOLLM2,
    "draft": "576,29,9,3,64,1536",
    "dtype": "float32",
    "option": [("on_miss", "wait")],
}


def numbers(text: str) -> list[int]:
    """``"1,2"`` -> [1, 2]."""
    return [int(part) for part in text.split(",") if part]


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that `engine_arguments` and `find_model` need, and those passed on to vLLM."""
    add = parser.add_argument
    model = f'a folder, a hub name, "{SMOLLM2}", or a stand-in\'s shape: a name or six sizes'
    add("--target", default=SMOLLM2, help=model)
    add("--draft", default="draft-1b", help=model)
    add("--drop", type=numbers, default=[14], help="layers a stand-in draft leaves out")
    add("--models", type=Path, default=Path(".models"), help="where models are made")
    add("--load-format", help='vLLM\'s; default: "standin" if one is a stand-in, else "auto"')
    add("--dtype", choices=("auto", *DTYPES), default="bfloat16")
    add("--tp", type=int, default=1, help="GPUs of the target")
    key: dict[str, Any] = {
        "type": _option,
        "action": "append",
        "default": [],
        "metavar": "KEY=JSON",
    }
    add("--option", help="of method ssd; may be repeated", **key)
    add("--engine-option", help="a further argument of every engine", **key)
    add("--max-model-len", type=int, default=2048)
    add("--gpu-memory-utilization", type=float, default=0.9)
    add("--logs", type=Path, help="where engines' logs go; default: a new temporary folder")


def engine_arguments(
    args: argparse.Namespace, target: Model, draft: Model, on_gpus: bool
) -> dict[str, Any]:
    """Arguments of every engine of a benchmark, as vLLM names them."""
    formats = {target.load_format, draft.load_format}
    engine = {
        "model": target.path,
        "dtype": args.dtype,
        # It loads other models, too.
        "load_format": args.load_format or (STANDIN_KEY if STANDIN_KEY in formats else "auto"),
        "max_model_len": args.max_model_len,
    }
    if on_gpus:
        engine["gpu_memory_utilization"] = args.gpu_memory_utilization
    return {**engine, **dict(args.engine_option)}


def combinations(options: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Every combination of the values that options were given, in the order of the command line:
    one empty combination if there are no options."""
    given: dict[str, list[Any]] = {}
    for name, value in options:
        given.setdefault(name, []).append(value)
    return [dict(zip(given, values)) for values in product(*given.values())]


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=JSON: {error}") from None
