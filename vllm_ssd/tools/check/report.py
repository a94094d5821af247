"""The file of ``vllm-ssd check --report``, to attach to a bug report. It has no prompts."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from typing import TextIO

from vllm_ssd.tools.check.findings import Finding, summary
from vllm_ssd.tools.stats import Reading

_PACKAGES = re.compile(r"vllm.*|torch|triton|flashinfer.*|amd-flashinfer|transformers|ray|pyzmq")
_VARIABLES = re.compile(r"(VLLM|SSD|CUDA|HIP|ROCR|RAY|TRITON|NCCL|OMP)_\w+")
_SECRET = re.compile(r"KEY|TOKEN(?!S|IZER)|SECRET|PASSWORD|CREDENTIAL", re.I)


def write_report(file: TextIO, arguments: Sequence[str], findings: Sequence[Finding]) -> None:
    """Write the command's arguments, versions, machine, findings and the counters of this user's
    running engines, without secrets."""
    named = ((each.name or "", each.version) for each in distributions())
    parts = {
        "command": [shlex.join(["vllm-ssd", *without_secrets(arguments)])],
        "versions": sorted({f"{n} {v}" for n, v in named if _PACKAGES.fullmatch(n)}),
        "machine": [platform.platform(), f"{os.cpu_count()} cores", *_gpus()],
        "environment": [
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        ],
        "findings": [*(finding.shown() for finding in findings), summary(findings)],
        "counters": [json.dumps([each.as_json() for each in Reading.now().reports], indent=1)],
    }
    for name, lines in parts.items():
        print(f"## {name}", *lines, "", sep="\n", file=file, flush=True)


def without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, without the values of options such as ``--api-key``."""
    hidden = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name.startswith("-"):
            secret = bool(_SECRET.search(name))
            yield f"{name}=..." if secret and equals else argument
            hidden = secret and not equals  # all that follows: --api-key takes several
        else:
            yield "..." if hidden else argument


def _gpus() -> list[str]:
    """Names, drivers and memory of NVIDIA's GPUs; the findings name others."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []
