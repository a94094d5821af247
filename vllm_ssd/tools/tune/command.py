"""``vllm-ssd tune``: which draft, k and f serve the user's own prompts best, if any does."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_ssd import __version__
from vllm_ssd.tools.check.findings import say
from vllm_ssd.tools.tune.candidates import PLAIN, Candidate, Outcome, search, speedup
from vllm_ssd.tools.tune.measure import PROMPTS, Failed, Measurer
from vllm_ssd.tools.tune.prompts import BUILT_IN, read_prompts
from vllm_ssd.tools.tune.report import report

_HELP = "which draft, k and f serve your prompts best, or whether plain vLLM does"


def add_command(commands: Any) -> None:
    """Add it to the subparsers of ``vllm-ssd``."""
    parser = commands.add_parser(
        "tune",
        help=_HELP,
        allow_abbrev=False,  # what is not known here is vLLM's
        description=f"Measures {_HELP}, with vllm serve and vllm bench serve. The same command, "
        "called again, measures only what is not measured yet.",
        epilog="Further arguments are the engine's, as for vllm serve: -tp 4, "
        "--dtype bfloat16, ...",
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="the model to be served")
    add("--draft", action="append", help="may be repeated; default: by the target's family")
    add("--k", type=_numbers, default=[2, 3, 5, 7, 10], help="default: 2,3,5,7,10")
    add("--f", type=_numbers, default=[1, 3, 6], help="default: 1,3,6")
    add("--at-most", type=int, default=12, help="candidates beside plain vLLM; default: 12")
    add("--prompts", type=Path, help='one a line, or .jsonl with "prompt"; default: some questions')
    add("--clients", type=_numbers, default=[1, 8], help="requests at once; default: 1,8")
    add("--requests", type=int, default=8, help="of each client; default: 8")
    add("--tokens", type=int, default=256, help="of an answer, at most; default: 256")
    add("--temperature", type=float, help="default: the model's own")
    add("--limit", type=float, default=1800.0, help="seconds for each candidate; default: 1800")
    add("--results", type=Path, default=Path("ssd-tune"), help="a folder; default: ssd-tune")
    add("--speculative-config", "-sc", type=json.loads, default={}, help="further options of ssd")
    parser.set_defaults(run=run, takes_further=True)


def run(args: argparse.Namespace, further: Sequence[str]) -> int:
    """Measure and print; returns the process's exit status. further: arguments for vLLM."""
    environment = dict(os.environ)  # of servers: to make a config changes ours
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        _check_numbers(args)
        prompts = BUILT_IN if args.prompts is None else read_prompts(args.prompts)
        drafts, machine = _check_candidates(args, further)
    except ValueError as error:
        say(f"vllm-ssd tune: {error}")
        return 2
    measurer = Measurer(args, further, _folder(args, further, prompts, machine), environment)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _tune(args, drafts, measurer)
    except KeyboardInterrupt:
        say("Ended. The same command goes on from here.")
        return 130


def _tune(args: argparse.Namespace, drafts: Sequence[str], measurer: Measurer) -> int:
    most = 1 + min(args.at_most, len(drafts) + len(args.k) + len(args.f) - 2)
    clients = " and ".join(map(str, args.clients))
    say(
        f"Plain vLLM and up to {most - 1} candidates, with {clients} requests at once. Each takes "
        f"at most {args.limit / 60:g} minutes, all of them {most * args.limit / 3600:.1f} hours."
    )
    say(f"Results and logs: {measurer.folder}")
    outcomes: dict[Candidate, Outcome] = {}

    def score(candidate: Candidate) -> float:
        say(f"[{len(outcomes) + 1} of at most {most}] {candidate.name}")
        try:
            outcomes[candidate] = measurer.measure(candidate)
        except (Failed, OSError) as error:  # OSError: the server is gone
            outcomes[candidate] = {}
            say(f"  failed: {error}")
        return speedup(outcomes[candidate], outcomes[PLAIN])

    if not score(PLAIN):
        say("Plain vLLM could not be measured, so there is nothing to compare with.")
        return 1
    search(drafts, args.k, args.f, most - 1, score)
    print(report(outcomes, args.speculative_config))
    return 0


def _folder(
    args: argparse.Namespace, further: Sequence[str], prompts: Sequence[str], machine: str
) -> Path:
    """A folder for this setting, with its prompts: others cannot be compared with it."""
    import vllm

    versions = [vllm.__version__, __version__]
    shared = ("target", "speculative_config", "requests", "tokens", "temperature")
    setting = {name: getattr(args, name) for name in shared}
    about = json.dumps([setting, further, prompts, machine, versions], indent=1)
    folder: Path = args.results / blake2b(about.encode(), digest_size=4).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "setting.json").write_text(about)
    contents = [{"content": [{"type": "text", "text": prompt}]} for prompt in prompts]
    (folder / PROMPTS).write_text("".join(json.dumps(each) + "\n" for each in contents))
    return folder


def _check_candidates(args: argparse.Namespace, further: Sequence[str]) -> tuple[list[str], str]:
    """``ValueError`` with a sentence if a start would refuse a draft, or the largest k and f. The
    drafts, and the machine in words."""
    from vllm.platforms import current_platform

    from vllm_ssd.config.default_drafts import default_draft
    from vllm_ssd.lifecycle.cores import available_cores
    from vllm_ssd.tools.check.engine import look_at_engine, parse_engine

    drafts: list[str] = []
    for draft in args.draft or [args.speculative_config.get("model")]:
        engine = parse_engine(args.target, draft, further)
        parsed: dict[str, Any] = engine.speculative_config or {}
        if parsed.keys() - {"method", "model"}:
            raise ValueError("options of ssd are in parts: write --speculative-config '{...}'")
        options = {**args.speculative_config, **parsed, "k": max(args.k), "f": max(args.f)}
        engine.speculative_config = options
        for finding in look_at_engine(engine):
            if finding.state == "bad":
                remedy = f": {finding.remedy}" if finding.remedy else ""
                raise ValueError(f"{finding.fact}{remedy}")
        if draft is None:
            config = engine.create_model_config().hf_text_config
            draft = default_draft(config, args.target)
        drafts.append(draft)
    if current_platform.is_cpu():
        return drafts, f"{len(available_cores())} CPU cores"
    count = current_platform.device_count()
    return drafts, f"{count} x {current_platform.get_device_name(0)}"


def _check_numbers(args: argparse.Namespace) -> None:
    least = {"k": 1, "f": 0, "clients": 1, "requests": 1, "tokens": 2, "at_most": 1}
    for name, value in least.items():
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < value:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {given}: write numbers from {value} on")


def _numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})
