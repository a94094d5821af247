"""A private Ray instance for the draft, on this machine, for its owner only.

A process that reaches Ray's ports can run code as Ray's owner, so this Ray listens on loopback and
asks for a token. Ray documents no option for loopback, so each start checks where it listens.

The run directory has a token for this engine alone. By default Ray keeps it in the home directory,
where the umask may let others read it. A container's user may have no home directory.
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
# repeat the job's setup. RAY_AUTH_TOKEN would override the token file.
OTHER_RAY = (
    "RAY_ADDRESS",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_RUNTIME_ENV_HOOK",
    "RAY_AUTH_TOKEN",
)
_VITAL = ("gcs_server", "raylet")


def token_path(run_dir: Path) -> Path:
    """Path of the file with the token of an engine's Ray."""
    return run_dir / "token"


def set_environment(run_dir: Path) -> None:
    """Set Ray's variables in this process. Call it before Ray is imported and started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in OTHER_RAY:
        os.environ.pop(name, None)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_path(run_dir))
    # When the host runs short of memory, Ray kills its largest worker. The draft is its only one
    # and would be killed, however little memory it uses.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"
    # Ray gives its workers niceness 15. On CPUs the draft would then get almost no time on a core
    # that another process uses, and could not even load its weights next to a busy target.
    os.environ["RAY_worker_niceness"] = "0"
    # Ray listens on all interfaces, whatever address it is given, unless it assumes that a cluster
    # is impossible. Despite its name, this variable works on every system.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # The draft's process group has one member. Its sockets would listen at the address of the host
    # name, or on the interface that a cluster's environment chooses for its targets.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    # The draft server's lines have vLLM's prefix. Ray would add its own, in colors.
    os.environ["RAY_DISABLE_WORKER_LOG_PREFIX"] = "1"
    os.environ["RAY_COLOR_PREFIX"] = "0"
    # The keeper has no parent. Ray would take the raylet for dead and end the keeper silently.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())


class DraftLost(Exception):
    """The draft server has ended, hangs or could not be started, or other machines could reach its
    Ray. The message says why."""


def sentence(error: Exception) -> str:
    """The first line of an actor's own error, without the traceback that Ray puts around it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


class UsersRay:
    """The user's Ray cluster, in one of whose actors the keeper runs: nothing to start or stop."""

    def start(self) -> None:
        """The cluster runs."""

    stop = check_listeners = start

    def lives(self) -> bool:
        """This process ends with its node."""
        return True

    def set_variables(self, environment: dict[str, str]) -> None:
        """Let the draft's actor have these variables."""
        self._environment = environment

    def options(self) -> dict[str, Any]:
        """Options of the draft's actor: on this node, where this actor has the GPU."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = ray.get_runtime_context().get_node_id()
        return {
            "runtime_env": {"env_vars": self._environment},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }


class OwnRay:
    """Starts, checks and stops the draft's Ray. Call ``start`` again whenever it has ended. The
    constructor imports Ray, which takes about a second."""

    def __init__(self, run_dir: Path):
        import ray

        self._ray: Any = ray
        self._run_dir = run_dir
        self._token = secrets.token_hex(32)  # one for all starts: a process reads it only once
        self._vital: list[psutil.Process] = []  # Ray does not work without these
        self.unseen = False  # some of its sockets cannot be inspected

    def start(self) -> None:
        """Start Ray, after removing the remains of an instance that has ended. Raises ``DraftLost``
        if other machines can reach it, and Ray's own errors, which are of many kinds."""
        self._ray.shutdown()
        path = token_path(self._run_dir)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._token)
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
                continue  # the process has just ended
            except (psutil.Error, OSError, RuntimeError) as error:
                unseen.append(f"sockets of {name} ({type(error).__name__})")
        if open_ones:
            self.stop()
            raise DraftLost(
                f"other machines could reach the draft's Ray {self._ray.__version__}, of which "
                f"{', '.join(open_ones[:3])} listens: install ray==2.60.0, which is known to "
                "listen on loopback only"
            )
        if not (listens or unseen):
            unseen.append("where it listens")  # Ray always listens: this system hides its sockets
        if unseen and not self.unseen:
            self.unseen = True
            logger.warning(
                "SSD: it is not known whether other machines can reach the draft's Ray: %s cannot "
                "be looked at; see by 'ss -ltnp' that it listens on loopback only",
                ", ".join(unseen),
            )

    def set_variables(self, environment: dict[str, str]) -> None:
        """Let Ray and the draft's actor inherit these variables. On ROCm, Ray does not start if the
        environment has ROCR_VISIBLE_DEVICES without HIP_VISIBLE_DEVICES."""
        os.environ.update(environment)

    def options(self) -> dict[str, Any]:
        """Options of the draft's actor."""
        return {}

    def lives(self) -> bool:
        """Whether Ray can be used."""
        return self._ray.is_initialized() and not any(map(has_ended, self._vital))

    def stop(self) -> None:
        """End Ray and everything that it runs."""
        self._ray.shutdown()


def _is_vital(process: psutil.Process) -> bool:
    """Whether Ray needs this process."""
    try:
        return process.name() in _VITAL
    except psutil.NoSuchProcess:
        return False


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Addresses and ports at which a process listens. Raises psutil's errors, ``OSError`` and
    ``RuntimeError`` if the system does not show them."""
    sockets = process.net_connections("tcp")
    return [tuple(socket.laddr) for socket in sockets if socket.status == psutil.CONN_LISTEN]


def _is_loopback(address: str) -> bool:
    host = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(host, "ipv4_mapped", None) or host).is_loopback


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended. A zombie, for which its parent has not waited, has ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
