"""``vllm-ssd check``: tells whether ssd can start here, and what to do if it cannot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_ssd.tools.check.findings import Finding, quiet_vllm, refusal, summary
from vllm_ssd.tools.options import add_option


def add_command(commands: Any) -> None:
    """Add the command ``check`` to the subparsers of ``vllm-ssd``."""
    parser = commands.add_parser(
        "check",
        help="Check whether ssd can start here, and say what to do if not.",
        usage="vllm-ssd check [TARGET] [options] [arguments of vllm serve]",
        allow_abbrev=False,  # unknown arguments belong to vLLM
        description="Checks whether ssd can start on this machine, with these models. No model is "
        "loaded. It takes about a minute; on a GPU, kernels may compile for minutes. A bad line "
        "has the remedy below it. If there is one, the exit status is 1.",
        epilog="Further arguments are vllm serve's, such as -tp 4 or --speculative-config '{...}'.",
    )
    about = "The model to serve. Without it, only the machine is checked."
    parser.add_argument("target", nargs="?", metavar="TARGET", help=about)
    add_option(parser, "--draft DRAFT", "The draft model. Default: by the target's family.")
    about = "Draft tokens per round, 1 to 16. Default: mostly 15 on GPUs, 7 on CPUs."
    add_option(parser, "--k TOKENS", about, int)
    about = "Bonus tokens predicted for each accepted length. Default: 2 on GPUs, 3 on CPUs."
    add_option(parser, "--f COUNT", about, int)
    about = "Also write versions, machine, findings and counters to FILE, for a bug report."
    add_option(parser, "--report FILE", about, argparse.FileType("w", encoding="utf-8"))
    parser.set_defaults(run=run, takes_further=True)


def run(args: argparse.Namespace, further: Sequence[str]) -> int:
    """Print all findings and return the process's exit status. further: arguments for vLLM."""
    if args.target is None and (further or {args.draft, args.k, args.f} != {None}):
        print("vllm-ssd check: TARGET is missing: write it before the options")
        return 2
    findings = []
    with quiet_vllm():
        for finding in _look(args, further):
            print(finding.shown(), flush=True)
            findings.append(finding)
    print(f"\n{summary(findings)}")
    if args.report is not None:
        from vllm_ssd.tools.check.report import write_report

        write_report(args.report, sys.argv[1:], findings)
    return int(any(finding.state == "bad" for finding in findings))


def _look(args: argparse.Namespace, further: Sequence[str]) -> Iterator[Finding]:
    from vllm_ssd.tools.check.software import examine_software

    for finding in examine_software():
        yield finding
        if finding.state == "bad":
            return
    # These import vLLM, which works, as was found above.
    from vllm_ssd.tools.check import engine, machine

    try:
        if args.target is None:
            yield from engine.examine_target_memory()
            subject: engine.Subject | None = machine.subject_without_target()
        else:
            own = {"model": args.draft, "k": args.k, "f": args.f}
            parsed = engine.parse_engine(args.target, own, further)
            subject = yield from engine.examine_engine(parsed)
    except ValueError as error:
        yield refusal("engine" if args.target else "machine", error)
        return
    if subject is not None:
        yield from machine.examine_machine(subject)
