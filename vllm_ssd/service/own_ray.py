"""A private Ray instance for the draft, on this machine, for its owner only.

A process that reaches Ray's ports can run code as Ray's owner, so this Ray listens on loopback and
asks for a token. Ray documents no option for loopback, so each start checks where it listens.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import psutil

from vllm_ssd.log import get_logger

logger = get_logger(__name__)

OBJECT_STORE_BYTES = 80 * 2**20  # close to Ray's minimum; the draft stores no objects
# The target may be a job of another Ray cluster. The draft must neither join that cluster nor
# repeat the job's setup.
OTHER_RAY = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")


def set_environment() -> None:
    """Set Ray's variables in this process. Call it before Ray is imported and started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in OTHER_RAY:
        os.environ.pop(name, None)
    os.environ |= {
        # Other users cannot read it here. Ray's file would be in the home directory, where the
        # umask may let others read it. A container's user may have no home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # When the host runs short of memory, Ray kills its largest worker. The draft is its only
        # one and would be killed, however little memory it uses.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray gives its workers niceness 15. On CPUs the draft would then get almost no time on a
        # core that another process uses, and could not even load its weights next to a busy target.
        "RAY_worker_niceness": "0",
        # Ray listens on all interfaces, whatever address it is given, unless it assumes that a
        # cluster is impossible. Despite its name, this variable works on every system.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # The draft's process group has one member. Its sockets would listen at the address of the
        # host name, or on the interface that a cluster's environment chooses for its targets.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # The draft server's lines have vLLM's prefix. Ray would add its own, in colors.
        "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
        "RAY_COLOR_PREFIX": "0",
        # The keeper has no parent. Ray would take the raylet for dead and end the keeper silently.
        "RAY_RAYLET_PID": str(os.getpid()),
    }


class DraftLost(Exception):
    """The draft server has ended, hangs or could not be started, or other machines could reach its
    Ray. The message says why."""


class RayLost(DraftLost):
    """Ray could not be started, or has ended. Ray picks free ports and opens them a little later,
    when another process may have taken them, so the next start may succeed."""


def sentence(error: Exception) -> str:
    """The first line of an actor's own error, without the traceback that Ray puts around it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def place(actor: type, num_gpus: int = 0) -> Any:
    """The class of an actor on this process's node, for which Ray reserves ``num_gpus`` GPUs."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(actor).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=here)


class UsersRay:
    """The user's Ray cluster, in one of whose actors the keeper runs: nothing to start or stop."""

    def start(self) -> None:
        """The cluster runs."""

    stop = check_listeners = start

    def lives(self) -> bool:
        """This process ends with its node."""
        return True


class OwnRay:
    """Starts, checks and stops the draft's Ray. The constructor imports Ray, which takes about a
    second."""

    def __init__(self, run_dir: Path):
        import ray

        self._ray: Any = ray
        self._run_dir = run_dir
        self._vital: list[psutil.Process] = []  # Ray does not work without these
        self.unseen = False  # some of its sockets cannot be inspected

    def start(self) -> None:
        """Start Ray unless it runs. Raises ``DraftLost`` if other machines can reach it, and Ray's
        own errors, which are of many kinds."""
        if self.lives():
            return
        self._ray.shutdown()
        ending = signal.getsignal(signal.SIGTERM)
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
        signal.signal(signal.SIGTERM, ending)  # Ray's own handler would abort this process
        self._vital = list(filter(_is_vital, psutil.Process().children()))
        self.check_listeners()

    def check_listeners(self) -> None:
        """Check at which addresses this process and its descendants listen. Stops Ray and raises
        ``DraftLost`` if other machines can reach one of the sockets. Sockets that cannot be
        inspected cause one warning and no error."""
        listens, unseen, open_ones = False, "", []
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            try:
                sockets = process.net_connections("tcp")
                name = process.name()
            except psutil.NoSuchProcess:
                continue  # the process has just ended
            except (psutil.Error, OSError, RuntimeError) as error:
                unseen = f"sockets of process {process.pid} ({type(error).__name__})"
                continue
            for host, port in [s.laddr for s in sockets if s.status == psutil.CONN_LISTEN]:
                listens = True
                if not _is_loopback(host):
                    open_ones.append(f"{name} at {host} port {port}")
        if open_ones:
            self.stop()
            raise DraftLost(
                f"other machines could reach the draft's Ray {self._ray.__version__}, of which "
                f"{', '.join(open_ones[:3])} listens: install ray==2.60.0, which is known to "
                "listen on loopback only"
            )
        if not listens:  # Ray always listens: this system hides its sockets
            unseen = unseen or "where it listens"
        if unseen and not self.unseen:
            self.unseen = True
            logger.warning(
                "SSD: it is not known whether other machines can reach the draft's Ray: %s cannot "
                "be looked at; see by 'ss -ltnp' that it listens on loopback only",
                unseen,
            )

    def lives(self) -> bool:
        """Whether Ray can be used."""
        return self._ray.is_initialized() and not any(map(has_ended, self._vital))

    def stop(self) -> None:
        """End Ray and everything that it runs."""
        self._ray.shutdown()


def _is_vital(process: psutil.Process) -> bool:
    """Whether Ray needs this process. It does without its monitors and agents."""
    try:
        return process.name() in ("gcs_server", "raylet")
    except psutil.NoSuchProcess:
        return False


def _is_loopback(address: str) -> bool:
    host = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(host, "ipv4_mapped", None) or host).is_loopback


def has_ended(process: psutil.Process, *, wholly: bool = False) -> bool:
    """Whether the process has ended. A zombie, for which its parent has not waited, has ended.
    wholly: with all its threads, each of which could still write to a table."""
    try:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return not process.is_running() or (zombie and (not wholly or process.num_threads() <= 1))
    except psutil.NoSuchProcess:
        return True
