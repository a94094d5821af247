"""Tries whether the draft's own Ray starts here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from vllm_ssd.lifecycle import own_ray
from vllm_ssd.tools.check.findings import Finding, say_wait
from vllm_ssd.tools.check.trials import TrialFailed, examine_apart

LIMIT_S = 120.0


def try_ray(run_dir: Path) -> Iterator[Finding]:
    """Finding of a start of Ray that uses a run directory; takes at most ``LIMIT_S`` seconds."""
    say_wait(f"starting the draft's Ray: at most {LIMIT_S:g} s")
    try:
        yield from examine_apart(examine_ray, run_dir, limit_s=LIMIT_S, folder=run_dir)
    except TrialFailed as failure:
        yield Finding(
            "bad",
            "Ray",
            f"the draft's own Ray does not start ({failure})",
            "make the temporary folder (TMPDIR) writable, and let processes listen on 127.0.0.1",
        )


def examine_ray(run_dir: Path) -> Iterator[Finding]:
    """Start Ray in this process, and end it."""
    own_ray.set_environment(run_dir)
    began = time.monotonic()
    ray = own_ray.OwnRay(run_dir)
    import ray as package

    try:
        ray.start()
        took = time.monotonic() - began
        where = "at addresses that cannot be seen here" if ray.unseen else "on loopback"
        fact = f"{package.__version__}, starts in {took:.1f} s, {where} with a token"
        yield Finding("ok", "Ray", fact)
    finally:
        ray.stop()
