"""``vllm-ssd tune``: finds the draft, k and f that serve the user's own prompts best, or none."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_ssd import __version__
from vllm_ssd.tools.check.findings import quiet_vllm, say, say_wait
from vllm_ssd.tools.options import add_option
from vllm_ssd.tools.tune.candidates import PLAIN, Candidate, Outcome, report, search, speedup
from vllm_ssd.tools.tune.measure import CLIENTS, PROMPTS, measure

_LEAST = {"k": 1, "f": 0, "clients": 1, "requests": 1, "tokens": 2, "at_most": 1, "limit": 1}
_AS_TEXT = "{{ bos_token }}{{ messages[0].content }}"  # a chat template that adds nothing


def add_command(commands: Any) -> None:
    """Add the command ``tune`` to the subparsers of ``vllm-ssd``."""
    parser = commands.add_parser(
        "tune",
        help="Find the best draft, k and f for your prompts, or that plain vLLM is faster.",
        usage="vllm-ssd tune TARGET [options] [arguments of vllm serve]",
        allow_abbrev=False,  # unknown arguments belong to vLLM
        description="Measures plain vLLM, then ssd with each draft, k and f in turn, on this "
        "machine and with your prompts. It ends with a table and the --speculative-config to use. "
        "Each candidate takes minutes. After Ctrl-C, the same command continues.",
        epilog="Arguments of vllm serve are for all candidates: -tp 4, --dtype bfloat16, ...",
    )
    parser.add_argument("target", metavar="TARGET", help="The model to serve.")
    add = partial(add_option, parser.add_argument_group("what to try"))
    about = "A draft to try; may be repeated. Default: by the target's family."
    add("--draft DRAFT", about, action="append")
    add("--k K,...", "Values of k: draft tokens per round.", numbers, [2, 3, 5, 7, 15])
    add("--f F,...", "Values of f: bonus tokens per accepted length.", numbers, [1, 2, 3, 6])
    add("--speculative-config -sc JSON", "Further options of ssd, for all candidates.", options)
    add("--at-most COUNT", "Most candidates to measure, plain vLLM not counted.", int, 12)
    add("--limit SECONDS", "Most seconds for a candidate and its start.", int, 1800)
    add("--results FOLDER", "Folder for results and logs.", Path, Path("ssd-tune"))
    add = partial(add_option, parser.add_argument_group("the requests"))
    add("--prompts FILE", "Your prompts, one a line. Default: 12 questions of many kinds.", Path)
    add("--clients COUNT,...", "Numbers of requests at the same time.", numbers, [1, 8])
    add("--requests COUNT", "Requests that each client sends.", int, 8)
    add("--tokens COUNT", "Tokens of the longest answer.", int, 256)
    add("--temperature T", "Temperature of the requests. Default: the model's own.", float)
    parser.set_defaults(run=run, takes_further=True, speculative_config={})


def run(args: argparse.Namespace, further: Sequence[str]) -> int:
    """Measure, print a report and return the process's exit status. further: vLLM's arguments."""
    try:
        for name, least in _LEAST.items():
            lowest = min(given) if isinstance(given := vars(args)[name], list) else given
            if lowest < least:
                option = f"--{name.replace('_', '-')} {lowest:g}"
                raise ValueError(f"{option} is too low: write {least} or more")
        if args.temperature is not None and not 0 <= args.temperature <= 2:
            raise ValueError(f"--temperature {args.temperature:g} is no temperature: write 0 to 2")
        for name in args.speculative_config.keys() & {"k", "f", "num_speculative_tokens"}:
            raise ValueError(
                f"--speculative-config has {name!r}, of which tune tries several: "
                "write its values as in --k 7,15 --f 2,3"
            )
        prompts = read_prompts(args.prompts or Path(__file__).with_name("prompts.jsonl"))
        say_wait("importing vLLM and checking the drafts: about a minute")
        with quiet_vllm():
            drafts, template = _check(args, further)
        further = [*template, *further]
        folder = _make_folder(args, further, prompts)
    except ValueError as error:
        say(f"vllm-ssd tune: {error}")
        return 2
    most = min(args.at_most, len(drafts) + len(args.k) + len(args.f) - 2)
    say(
        f"Plain vLLM and up to {most} candidates are measured, in at most {args.limit} s each: "
        f"drafts {', '.join(drafts)}; k {args.k}; f {args.f}; {len(prompts)} prompts"
        f"{', as plain text because the target has no chat template' if template else ''}.\n"
        f"Results and logs: {folder}. Ctrl-C ends this; the same command continues later."
    )
    outcomes: dict[Candidate, Outcome] = {}

    def score(candidate: Candidate) -> float:
        if candidate not in outcomes and len(outcomes) <= most:
            say(f"[{len(outcomes) + 1} of at most {most + 1}] {candidate.name}")
            outcomes[candidate] = measure(candidate, args, further, folder)
        return speedup(outcomes.get(candidate, {}), outcomes[PLAIN])

    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    if not score(PLAIN):
        say("Plain vLLM could not be measured, so there is nothing to compare with.")
        return 1
    search(drafts, args.k, args.f, score)
    print(report(outcomes, args.speculative_config))
    return 0


def _check(args: argparse.Namespace, further: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the drafts, and the chat template's argument if the target has no template. Raises
    ``ValueError`` with a sentence if a start would refuse a draft or the largest k and f."""
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import cached_tokenizer_from_config

    from vllm_ssd.config.default_drafts import default_draft
    from vllm_ssd.tools.check.engine import examine_engine, parse_engine

    for word in further:
        if word.replace("_", "-").startswith(("--spec", "-sc")):
            raise ValueError(
                f"{word.partition('=')[0]} would also change plain vLLM: write --draft DRAFT, or "
                "options of ssd as one JSON object, --speculative-config '{...}'"
            )
    drafts: list[str] = []
    for draft in args.draft or [args.speculative_config.get("model")]:
        engine: Any = parse_engine(args.target, {"model": draft}, further)
        given = {**args.speculative_config, **engine.speculative_config}
        engine.speculative_config = {**given, "k": max(args.k), "f": max(args.f)}
        for finding in examine_engine(engine):
            if finding.state == "bad":
                raise ValueError(f"{finding.fact}: {finding.remedy}")
        target = engine.create_model_config()
        drafts.append(draft or default_draft(target.hf_text_config, args.target))
    named = any(word.partition("=")[0] == "--chat-template" for word in further)
    tokenizer: Any = cached_tokenizer_from_config(target)
    # A tokenizer without this attribute has its template in its code.
    own = not hasattr(tokenizer, "chat_template") or resolve_chat_template(
        tokenizer, None, None, model_config=target
    )
    return drafts, [] if named or own else ["--chat-template", _AS_TEXT]


def _make_folder(args: argparse.Namespace, further: Sequence[str], prompts: Sequence[str]) -> Path:
    """Make a folder with the requests of this setting; results of other settings do not compare."""
    import vllm

    setting = [args.target, args.speculative_config, args.requests, args.tokens, args.temperature]
    machine = [platform.node(), os.environ.get("CUDA_VISIBLE_DEVICES")]
    about = json.dumps([*setting, *further, *prompts, *machine, vllm.__version__, __version__])
    folder: Path = args.results / blake2b(about.encode(), digest_size=4).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "setting.json").write_text(about)
    except OSError as error:
        raise ValueError(f"--results {folder}: {error.strerror}: name another folder") from None
    contents = [{"content": [{"type": "text", "text": prompt}]} for prompt in prompts]
    (folder / PROMPTS).write_text("".join(json.dumps(each) + "\n" for each in contents))
    clients = [
        {"max-concurrency": n, "num-prompts": n * args.requests, "num-warmups": n * 2}
        for n in args.clients
    ]
    (folder / CLIENTS).write_text(json.dumps(clients))
    return folder


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: one per line, or in a .jsonl file the "prompt" of one JSON object per
    line. Raises ``ValueError`` with a sentence if there are none."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            lines = [json.loads(line)["prompt"] for line in lines]
        if not lines or not all(isinstance(line, str) for line in lines):
            raise ValueError("there are none")
    except (OSError, ValueError, KeyError, TypeError) as error:
        how = 'write one a line, or in a .jsonl file {"prompt":"..."}'
        raise ValueError(f"{path} cannot be read as prompts ({error}): {how}") from None
    return lines


def numbers(text: str) -> list[int]:
    """The numbers in a text such as "2,3,5", each once and in order."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        how = "is not a list of whole numbers: write them as in 2,3,5"
        raise argparse.ArgumentTypeError(f"{text!r} {how}") from None


def options(text: str) -> dict[str, Any]:
    """The options in a JSON object."""
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        how = """is not a JSON object: write options as in '{"on_miss":"wait"}'"""
        raise argparse.ArgumentTypeError(f"{text!r} {how}") from None
