"""``vllm-ssd tune``: finds the draft, k and f that serve the user's own prompts best, or none."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_ssd import __version__
from vllm_ssd.tools.check.findings import say, say_wait
from vllm_ssd.tools.options import add_option
from vllm_ssd.tools.tune.candidates import PLAIN, Candidate, Outcome, search, speedup
from vllm_ssd.tools.tune.measure import END_S, PROMPTS, Failed, Measurer
from vllm_ssd.tools.tune.prompts import AS_TEXT, BUILT_IN, has_chat_template, read_prompts
from vllm_ssd.tools.tune.report import report


def add_command(commands: Any) -> None:
    """Add the command ``tune`` to the subparsers of ``vllm-ssd``."""
    parser = commands.add_parser(
        "tune",
        help="Find the draft, k and f that serve your prompts best, or that plain vLLM does.",
        usage="vllm-ssd tune TARGET [options] [arguments of vllm serve]",
        allow_abbrev=False,  # unknown arguments belong to vLLM
        description="Measures plain vLLM, then ssd with each draft, k and f in turn, on this "
        "machine and with your prompts. It ends with a table and the --speculative-config to use. "
        "Each candidate takes minutes: the server starts, then answers. A command that was ended "
        "goes on when it is called again.",
        epilog="Further arguments are those of vllm serve, for every candidate: -tp 4, "
        "--dtype bfloat16, --chat-template FILE, ...",
    )
    parser.add_argument("target", metavar="TARGET", help="The model to serve.")
    add = partial(add_option, parser.add_argument_group("what to try"))
    about = "A draft to try; may be repeated. Default: the one that ssd takes for this target."
    add("--draft DRAFT", about, action="append")
    add("--k K,...", "Values of k: draft tokens per round.", _numbers, [2, 3, 5, 7, 10])
    about = "Values of f: predicted bonus tokens per accepted length."
    add("--f F,...", about, _numbers, [1, 3, 6])
    about = 'Further options of ssd for every candidate, such as \'{"on_miss":"wait"}\'.'
    add("--speculative-config -sc JSON", about, _options)
    add("--at-most COUNT", "Candidates to measure, plain vLLM not counted.", int, 12)
    add("--limit SECONDS", "Seconds for each candidate, with its server's start.", float, 1800)
    add = partial(add_option, parser.add_argument_group("the load"))
    about = 'Your prompts: one a line, or a .jsonl file of {"prompt": "..."}.'
    add("--prompts FILE", f"{about} Default: {len(BUILT_IN)} questions of many kinds.", Path)
    about = "Numbers of clients to measure with. A client sends one request at a time."
    add("--clients COUNT,...", about, _numbers, [1, 8])
    add("--requests COUNT", "Requests that each client sends.", int, 8)
    add("--tokens COUNT", "Tokens of the longest answer.", int, 256)
    add("--temperature T", "Temperature of the requests. Default: the model's own.", float)
    add = partial(add_option, parser.add_argument_group("results"))
    about = "Folder for results and logs, with a folder in it for each setting."
    add("--results FOLDER", about, Path, Path("ssd-tune"))
    parser.set_defaults(run=run, takes_further=True, speculative_config={})


def run(args: argparse.Namespace, further: Sequence[str]) -> int:
    """Measure, print a report and return the process's exit status. further: vLLM's arguments."""
    environment = dict(os.environ)  # for the servers: making a config changes os.environ
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        _check_numbers(args)
        prompts = BUILT_IN if args.prompts is None else read_prompts(args.prompts)
        say_wait("importing vLLM and checking the drafts: about a minute")
        drafts, machine, template = _check_candidates(args, further)
    except ValueError as error:
        say(f"vllm-ssd tune: {error}")
        return 2
    further = [*template, *further]
    measurer = Measurer(args, further, _folder(args, further, prompts, machine), environment)
    say(_plan(args, drafts, len(prompts), bool(template)))
    say(f"Results and logs: {measurer.folder}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _tune(args, drafts, measurer)
    except KeyboardInterrupt:
        say("Ended. The same command goes on from here.")
        return 130


def _count(args: argparse.Namespace, drafts: Sequence[str]) -> int:
    """Most candidates that are measured, plain vLLM included."""
    return 1 + min(args.at_most, len(drafts) + len(args.k) + len(args.f) - 2)


def _plan(args: argparse.Namespace, drafts: Sequence[str], prompts: int, as_text: bool) -> str:
    """Text that says what will be measured and how long that may take."""
    most = _count(args, drafts)
    clients, ks, fs = (", ".join(map(str, given)) for given in (args.clients, args.k, args.f))
    named = args.draft or "model" in args.speculative_config
    by_default = "" if named else ", ssd's own choice for this target"
    plain = ", sent as plain text because the target has no chat template" if as_text else ""
    each_s = args.limit + END_S
    return (
        f"Plain vLLM and up to {most - 1} candidates are measured, one value changed at a time:\n"
        f"  draft    {', '.join(drafts)}{by_default}\n"
        f"  k        {ks}\n"
        f"  f        {fs}\n"
        f"  prompts  {prompts}{plain}\n"
        f"  clients  {clients}, with {args.requests} requests each and answers of up to "
        f"{args.tokens} tokens\n"
        f"Each takes {each_s / 60:.0f} minutes at most, all of them {most * each_s / 3600:.1f} "
        "hours at most. Ctrl-C ends this."
    )


def _tune(args: argparse.Namespace, drafts: Sequence[str], measurer: Measurer) -> int:
    most = _count(args, drafts)
    outcomes: dict[Candidate, Outcome] = {}

    def score(candidate: Candidate) -> float:
        say(f"[{len(outcomes) + 1} of at most {most}] {candidate.name}")
        try:
            outcomes[candidate] = measurer.measure(candidate)
        except (Failed, OSError) as error:  # OSError: the server has ended
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
    """Make a folder with the prompts of this setting; results of other settings do not compare."""
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


def _check_candidates(
    args: argparse.Namespace, further: Sequence[str]
) -> tuple[list[str], str, list[str]]:
    """Return the drafts, the machine in words, and arguments of ``vllm serve`` with a chat template
    if the target has none. Raises ``ValueError`` with a sentence if a start would refuse a draft or
    the largest k and f."""
    from vllm.platforms import current_platform

    from vllm_ssd.config.default_drafts import default_draft
    from vllm_ssd.lifecycle.cores import available_cores
    from vllm_ssd.tools.check.engine import examine_engine, parse_engine

    drafts: list[str] = []
    for draft in args.draft or [args.speculative_config.get("model")]:
        engine = parse_engine(args.target, draft, further)
        parsed: dict[str, Any] = engine.speculative_config or {}
        if parsed.keys() - {"method", "model"}:
            raise ValueError(
                "--speculative-config is given in parts, with dots: write it as one JSON object, "
                "--speculative-config '{...}'"
            )
        options = {**args.speculative_config, **parsed, "k": max(args.k), "f": max(args.f)}
        engine.speculative_config = options
        for finding in examine_engine(engine):
            if finding.state == "bad":
                remedy = f": {finding.remedy}" if finding.remedy else ""
                raise ValueError(f"{finding.fact}{remedy}")
        target = engine.create_model_config()
        drafts.append(draft or default_draft(target.hf_text_config, args.target))
    given = any(word.partition("=")[0] == "--chat-template" for word in further)
    template = [] if given or has_chat_template(target) else ["--chat-template", AS_TEXT]
    if current_platform.is_cpu():
        return drafts, f"{len(available_cores())} CPU cores", template
    count = current_platform.device_count()
    return drafts, f"{count} x {current_platform.get_device_name(0)}", template


def _check_numbers(args: argparse.Namespace) -> None:
    least = {"k": 1, "f": 0, "clients": 1, "requests": 1, "tokens": 2, "at_most": 1, "limit": 1}
    for name, value in least.items():
        given = getattr(args, name)
        lowest = min(given) if isinstance(given, list) else given
        if lowest < value:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {lowest:g} is too low: write {value} or more")


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers: write them as in 2,3,5"
        ) from None


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a JSON object: write options as in \'{{"on_miss":"wait"}}\''
        )
    return options
