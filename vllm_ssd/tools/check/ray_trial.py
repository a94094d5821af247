"""Tries whether the draft's own Ray starts here: python -m vllm_ssd.tools.check.ray_trial RUN_DIR

Runs in a separate process, because Ray brings threads and changes the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from vllm_ssd.lifecycle import own_ray
from vllm_ssd.lifecycle.detached import absolute_paths
from vllm_ssd.tools.check.findings import Finding, say_wait

LIMIT_S = 120.0


def try_ray(run_dir: Path) -> Finding:
    """Finding of a start of Ray that uses a run directory; takes at most ``LIMIT_S`` seconds."""
    say_wait(f"starting the draft's Ray: at most {LIMIT_S:g} s")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_ssd.tools.check.ray_trial", str(run_dir)],
            cwd=run_dir,
            env=os.environ | absolute_paths(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode == 0:
            return Finding("ok", "Ray", done.stdout.strip())
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"it takes longer than {LIMIT_S:g} s"
    return Finding(
        "bad",
        "Ray",
        f"the draft's own Ray does not start ({reason})",
        "make the temporary folder (TMPDIR) writable, and let processes listen on 127.0.0.1",
    )


def main(run_dir: str) -> None:
    """Entry point of the trial's process; prints one line on stdout, or an error on stderr."""
    own_ray.set_environment(Path(run_dir))
    began = time.monotonic()
    ray = own_ray.OwnRay(Path(run_dir))
    import ray as package

    try:
        ray.start()
        took = time.monotonic() - began
        where = "at addresses that cannot be seen here" if ray.unseen else "on loopback"
        print(f"{package.__version__}, starts in {took:.1f} s, {where} with a token")
    finally:
        ray.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
