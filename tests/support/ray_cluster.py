"""A Ray cluster of two nodes: this one, and one in another network namespace."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.another_node import Node
from tests.support.harness import END_S, START_S, wait_for

ROOT = Path(__file__).parents[2]
PORT = 6401


@contextmanager
def ray_cluster(node: Node, labels: str, log: Path) -> Iterator[dict[str, str]]:
    """The environment of who is to reach it, once both nodes are there. labels: of the other one,
    as 'ray start' has them."""
    address = f"{node.here}:{PORT}"
    # Paths of Ray's sockets are long enough.
    with ExitStack() as ends, tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        token = Path(folder) / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        head = ["--head", f"--port={PORT}", f"--node-ip-address={node.here}", "--num-cpus=0"]
        head += ["--include-dashboard=false", f"--temp-dir={folder}"]
        other = [f"--address={address}", f"--node-ip-address={node.there}", "--num-cpus=1"]
        ends.enter_context(_running(_start(head), log.with_suffix(".head"), environment))
        _wait_up(log.with_suffix(".head"))
        command = node.command(*_start([*other, f"--labels={labels}"]))
        ends.enter_context(_running(command, log.with_suffix(".other"), environment))
        _wait_up(log.with_suffix(".other"))
        yield {**environment, "RAY_ADDRESS": address}


def _start(options: Sequence[str]) -> list[str]:
    ray = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    return [sys.executable, *ray, *options]


@contextmanager
def _running(command: Sequence[str], log: Path, further: dict[str, str]) -> Iterator[None]:
    """'ray start --block' ends what it has started when it is told to."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    # With Ray's own, 15, a worker would get next to nothing beside other tests until it is ours.
    niceness = {"RAY_worker_niceness": "5"}
    environment = {**os.environ, **further, **niceness, "PYTHONPATH": paths}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait(END_S)


def _wait_up(log: Path) -> None:
    wait_for("Ray node", lambda: "Ray runtime started" in log.read_text(), START_S)
