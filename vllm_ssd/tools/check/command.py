"""``vllm-ssd check``: tells whether ssd can start here, and what to do if it cannot."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ssd.tools.check.findings import (
    Finding,
    could_start,
    refusal,
    say_wait,
    summary,
)

if TYPE_CHECKING:
    from vllm_ssd.lifecycle.draft_device import DraftDevice
    from vllm_ssd.tools.check.engine import Subject


def add_command(commands: Any) -> None:
    """Add the command ``check`` to the subparsers of ``vllm-ssd``."""
    parser = commands.add_parser(
        "check",
        help="Check whether ssd can start here, and what to do where it cannot.",
        usage="vllm-ssd check [TARGET] [options] [arguments of vllm serve]",
        allow_abbrev=False,  # unknown arguments belong to vLLM
        description="Checks whether ssd can start on this machine, with these models. No model is "
        "loaded. It takes about a minute; on a GPU, kernels may compile for minutes. A line that "
        "is bad has the remedy below it, and the exit status is then 1.",
        epilog="Further arguments are those of vllm serve: -tp 4, --speculative-config '{...}', "
        "...",
    )
    about = "The model to serve. Without it, only the machine is checked."
    parser.add_argument("target", nargs="?", metavar="TARGET", help=about)
    about = "The draft model. Default: the one that ssd takes for this target."
    parser.add_argument("--draft", metavar="DRAFT", help=about)
    parser.add_argument(
        "--all-backends",
        action="store_true",
        help="Try every attention backend that the draft can have. Otherwise the check stops at "
        "the first that computes correctly, which is the one that ssd uses.",
    )
    parser.set_defaults(run=run, takes_further=True)


def run(args: argparse.Namespace, further: Sequence[str]) -> int:
    """Print all findings and return the process's exit status. further: arguments for vLLM."""
    if args.target is None and (further or args.draft is not None):
        print("vllm-ssd check: TARGET is missing: write it before --draft and vLLM's arguments")
        return 2
    # Hide vLLM's usual log lines about configs; its errors go to stderr.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    findings = []
    for finding in _look(args, further):
        print(finding.shown(), flush=True)
        findings.append(finding)
    print(f"\n{summary(findings)}")
    return 0 if could_start(findings) else 1


def _look(args: argparse.Namespace, further: Sequence[str]) -> Iterator[Finding]:
    from vllm_ssd.tools.check.software import look_at_software

    for finding in look_at_software():
        yield finding
        if finding.state == "bad":
            return
    from vllm_ssd.tools.check.host import look_at_memory

    yield look_at_memory()
    if args.target is None:
        try:
            subject = _usual_subject()
        except ValueError as error:
            yield refusal("draft's device", error)
            return
    else:
        from vllm_ssd.tools.check.engine import look_at_engine, parse_engine

        asked = yield from look_at_engine(parse_engine(args.target, args.draft, further))
        if asked is None:
            return
        subject = asked
    yield from _try(subject, args.all_backends)


def _usual_subject() -> Subject:
    """Subject for one engine on one device; ``ValueError`` if no device is left for its draft."""
    from vllm.config import ParallelConfig
    from vllm.platforms import current_platform

    from vllm_ssd.lifecycle.cores import available_cores, split_cores
    from vllm_ssd.lifecycle.draft_device import DraftDevice
    from vllm_ssd.lifecycle.placement import gpu_environment, place_draft
    from vllm_ssd.tools.check.engine import usual_subject

    parallel = ParallelConfig()
    if current_platform.is_cpu():
        cores = split_cores(available_cores(), 1, None, None)
        return usual_subject(DraftDevice(cores.draft), parallel)
    gpu = place_draft(None, 1, parallel, current_platform, 0).device
    environment = gpu_environment(gpu, current_platform.is_rocm())
    return usual_subject(DraftDevice([], gpu, environment), parallel)


def _try(subject: Subject, all_backends: bool) -> Iterator[Finding]:
    """Make or start these for a moment: the table, the draft's Ray, the draft's attention."""
    from vllm_ssd.protocol import rundir
    from vllm_ssd.tools.check.host import look_at_shared_memory
    from vllm_ssd.tools.check.ray_trial import RayTrial

    rundir.sweep()
    run_dir, locks = rundir.create()
    ray = RayTrial(run_dir)
    try:
        memory = list(look_at_shared_memory(run_dir, subject.table, subject.has_workers))
        yield from memory
        if could_start(memory):  # the trial of a GPU needs the table
            yield from _try_device(subject, str(rundir.table_path(run_dir)), all_backends)
        yield ray.finding()
    finally:
        ray.end()
        rundir.remove(run_dir)
        for lock in locks:
            os.close(lock)


def _try_device(subject: Subject, table: str, all_backends: bool) -> Iterator[Finding]:
    from vllm_ssd.tools.check.host import look_at_locked_memory

    if subject.device is None:
        fact = "vLLM's Ray will choose it, on the engine's node: it is not tried here"
        yield Finding("ok", "draft's device", fact)
    elif subject.device.gpu is None:
        yield from _try_cores(subject, subject.device, all_backends)
    else:
        yield look_at_locked_memory(subject.table)
        yield from _try_gpus(subject, subject.device, table, all_backends)


def _try_cores(subject: Subject, device: DraftDevice, all_backends: bool) -> Iterator[Finding]:
    from vllm_ssd.tools.check.device_trial import Trial, try_cpu
    from vllm_ssd.tools.check.devices import look_at_backends, look_at_memory

    report = try_cpu(Trial(subject.heads, subject.backends, all_backends))
    numbers = ", ".join(map(str, device.cores))
    yield from look_at_memory(f"cores {numbers}", report, subject.need)
    yield from look_at_backends(subject.backends, report.backends, subject.left_out)


def _try_gpus(
    subject: Subject, device: DraftDevice, table: str, all_backends: bool
) -> Iterator[Finding]:
    from vllm.platforms import current_platform

    from vllm_ssd.lifecycle.placement import gpu_environment, target_gpus
    from vllm_ssd.protocol.pages import REMEDY
    from vllm_ssd.tools.check.device_trial import LIMIT_S, Trial, try_gpu
    from vllm_ssd.tools.check.devices import (
        failed_trial,
        look_at_backends,
        look_at_memory,
        look_at_reach,
    )

    limit = f"at most {LIMIT_S:g} s, most of it to compile kernels that no cache has"
    name = f"GPU {device.gpu}"
    trial = Trial(subject.heads, subject.backends, all_backends, table)
    say_wait(f"trying the draft's {name}: {limit}")
    report = try_gpu(trial, device.environment)
    if isinstance(report, str):
        yield failed_trial(name, report)
    else:
        yield from look_at_memory(name, report, subject.need)
        yield from look_at_backends(subject.backends, report.backends, subject.left_out)
        used = next((each for each in report.backends if each.fault is None), None)
        sdpa = 'write "tree_backend": "sdpa", whose draft publishes from the CPU'
        graphs = used is not None and used.graphs
        yield look_at_reach("draft", name, report, sdpa if graphs else "")
    # Only the first GPU of the target looks drafts up.
    first, *_ = target_gpus(subject.engines, subject.parallel, current_platform)
    if first != device.gpu:
        name = f"GPU {first}"
        environment = gpu_environment(first, current_platform.is_rocm())
        say_wait(f"trying the target's {name}: {limit}")
        report = try_gpu(Trial(subject.heads, table=table), environment)
        if isinstance(report, str):
            yield failed_trial(name, report)
    if not isinstance(report, str):
        yield look_at_reach("target", name, report, REMEDY)
