"""The draft's Ray: its own, on this machine, and for its owner only.

Whoever reaches a Ray's ports runs code as its owner, so it listens on loopback and asks for a
token. Each start looks at where it does listen, since what has it do so is no documented option of
Ray's. The token is the engine's own, in the run directory: Ray's default is a file in the home
directory that the umask leaves open to others, and that cannot be made where the user of a
container has no home.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
from pathlib import Path
from typing import Any

import psutil

from vllm_ssd.log import get_logger

logger = get_logger(__name__)

OBJECT_STORE_BYTES = 80 * 2**20  # close to Ray's minimum; no objects go through it
# The target may be a job of another Ray. The draft must neither join that cluster nor repeat the
# job's setup, and RAY_AUTH_TOKEN would go before the file.
OTHER_RAY = (
    "RAY_ADDRESS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_RUNTIME_ENV_HOOK",
    "RAY_AUTH_TOKEN",
)
_VITAL = ("gcs_server", "raylet")


def token_path(run_dir: Path) -> Path:
    """Where the token of an engine's Ray is."""
    return run_dir / "token"


def set_environment(run_dir: Path) -> None:
    """Of this process, which is to call ``start`` and has not imported Ray yet."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in OTHER_RAY:
        os.environ.pop(name, None)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_path(run_dir))
    # Where the host's memory runs short, Ray would kill its largest worker: the draft, its only
    # one, however little of that memory it has.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"
    # Ray gives its workers the niceness 15: on CPUs the draft would get next to nothing of a core
    # that any other process wants, and a new one not even load its weights beside a busy target.
    os.environ["RAY_worker_niceness"] = "0"
    # Ray listens on all interfaces, whatever address it is told, except where it thinks that there
    # can be no cluster. The name is Ray's; it does the same everywhere.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # The draft is a world of one, whose sockets would listen at the address of the host's name, or
    # of the interface that a cluster's environment chooses for its targets.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    # Ray would take its raylet for dead since the keeper has no parent, and then end it as well.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())


class Reachable(RuntimeError):
    """Other machines can reach the draft's Ray. The message is a sentence."""


class OwnRay:
    """``start`` it again whenever it has ended. Ray itself is imported when this is made, which
    takes a second."""

    def __init__(self, run_dir: Path):
        import ray

        self._ray: Any = ray
        self._run_dir = run_dir
        self._token = secrets.token_hex(32)  # one for all starts: Ray reads it once a process
        self._vital: list[psutil.Process] = []  # without them it does not work
        self.unseen = False  # some of its sockets cannot be looked at

    def start(self) -> None:
        """After what is left of one that has ended is gone; raises as ``check_listeners``, and
        errors of many kinds."""
        self._ray.shutdown()
        path = token_path(self._run_dir)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._token)
        self._ray.init(
            address="local",
            num_cpus=1,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(self._run_dir / "ray"),
            _node_ip_address="127.0.0.1",
            logging_level=logging.WARNING,
        )
        self._vital = list(filter(_is_vital, psutil.Process().children()))
        self.check_listeners()

    def check_listeners(self) -> None:
        """Look at where this process and all that it has started listen. ``Reachable`` if other
        machines can reach one of these sockets; Ray is stopped then. Sockets that may not be looked
        at are no reason to end, but the log says so, once."""
        listens = False
        open_ones: list[str] = []
        unseen: list[str] = []
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            name = str(process.pid)
            try:
                name = process.name()
                for host, port in _listening(process):
                    listens = True
                    if not _is_loopback(host):
                        open_ones.append(f"{name} at {host} port {port}")
            except psutil.NoSuchProcess:
                continue  # it has just ended
            except (psutil.Error, OSError, RuntimeError) as error:
                unseen.append(f"sockets of {name} ({type(error).__name__})")
        if open_ones:
            self.stop()
            raise Reachable(
                f"other machines could reach the draft's Ray {self._ray.__version__}, of which "
                f"{', '.join(open_ones[:3])} listens: install ray==2.60.0, which is known to "
                "listen on loopback only"
            )
        if not (listens or unseen):
            unseen.append("where it listens")  # Ray always has some: this system does not tell
        if unseen and not self.unseen:
            self.unseen = True
            logger.warning(
                "SSD: it is not known whether other machines can reach the draft's Ray: %s cannot "
                "be looked at; see by 'ss -ltnp' that it listens on loopback only",
                ", ".join(unseen),
            )

    def lives(self) -> bool:
        """Whether it can be used."""
        return self._ray.is_initialized() and not any(map(has_ended, self._vital))

    def stop(self) -> None:
        """End it, and what it runs."""
        self._ray.shutdown()


def _is_vital(process: psutil.Process) -> bool:
    """Whether Ray does not work without this process."""
    try:
        return process.name() in _VITAL
    except psutil.NoSuchProcess:
        return False


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Addresses and ports at which it listens; raises errors of psutil's, ``OSError`` and
    ``RuntimeError`` if the system does not tell."""
    sockets = process.net_connections("tcp")
    return [tuple(socket.laddr) for socket in sockets if socket.status == psutil.CONN_LISTEN]


def _is_loopback(address: str) -> bool:
    host = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(host, "ipv4_mapped", None) or host).is_loopback


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended; a zombie, whose parent has yet to wait for it, has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
