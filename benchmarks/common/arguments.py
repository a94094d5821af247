"""What every benchmark's command line says about models and engines."""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.models import SMOLLM2, Model
from benchmarks.standin.build import DTYPES, STANDIN_KEY
from benchmarks.standin.folders import say

# Target and draft that two CPU cores can serve; the draft is the target without one layer. As slow
# as its target, it would not be worth a wait, and none of its drafts be verified.
SMALL: dict[str, Any] = {
    "target": SMOLLM2,
    "draft": "576,29,9,3,64,1536",
    "dtype": "float32",
    "option": [("on_miss", "wait")],
    "no_compile": True,
}

# Half the start-up time of vLLM's default at the same speed; a verify step is a uniform decode,
# and so a CUDA graph.
_UNCOMPILED_ON_GPUS: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
}
_UNCOMPILED_ON_CPUS: dict[str, Any] = {"enforce_eager": True}


def numbers(text: str) -> list[int]:
    """``"1,2"`` -> [1, 2]."""
    return [int(part) for part in text.split(",") if part]


def reals(text: str) -> list[float]:
    """``"0.5,inf"`` -> [0.5, inf]."""
    return [float(part) for part in text.split(",") if part]


def chosen_from(names: Sequence[str], what: str) -> Callable[[str], list[str]]:
    """An argument's type: ``"a,b"`` -> ["a", "b"], all of them among ``names``; ``what`` they are
    is said of one that is not."""

    def choose(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := sorted(set(chosen) - set(names)):
            raise argparse.ArgumentTypeError(
                f"no such {what}: {', '.join(unknown)}; choose from {', '.join(names)}"
            )
        return chosen

    return choose


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that `engine_arguments` and `find_model` need, and those passed on to vLLM."""
    add = parser.add_argument
    model = f'a folder, a hub name, "{SMOLLM2}", or a stand-in\'s shape: a name or six sizes'
    add("--target", default=SMOLLM2, help=model)
    add("--draft", default="draft-1b", help=model)
    add("--drop", type=numbers, default=[14], help="layers a stand-in draft leaves out")
    add("--models", type=Path, default=Path(".models"), help="where models are made")
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
    add(
        "--no-compile",
        action="store_true",
        help="engines without torch.compile and, on GPUs, with CUDA graphs for decoding only, to "
        "save time at their start; default: as vLLM does",
    )
    add("--max-model-len", type=int, default=2048)
    add("--gpu-memory-utilization", type=float, default=0.9)
    add("--logs", type=Path, help="where engines' logs go; default: a new temporary folder")


def log_folder(args: argparse.Namespace) -> Path:
    """Where engines' logs go, which is said."""
    logs: Path = args.logs or Path(tempfile.mkdtemp(prefix="ssd-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    say(f"logs are in {logs}")
    return logs


def engine_arguments(
    args: argparse.Namespace, target: Model, draft: Model, on_gpus: bool
) -> dict[str, Any]:
    """Arguments of every engine of a benchmark, as vLLM names them."""
    formats = {target.load_format, draft.load_format}
    engine = {
        "model": target.path,
        "dtype": args.dtype,
        # It loads other models, too.
        "load_format": STANDIN_KEY if STANDIN_KEY in formats else "auto",
        "max_model_len": args.max_model_len,
        "tensor_parallel_size": args.tp,
    }
    if on_gpus:
        engine["gpu_memory_utilization"] = args.gpu_memory_utilization
    if args.no_compile:
        engine.update(_UNCOMPILED_ON_GPUS if on_gpus else _UNCOMPILED_ON_CPUS)
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
