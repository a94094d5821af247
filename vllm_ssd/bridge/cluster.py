"""Connects a process to the user's Ray cluster, where the drafts of a service have names."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

NAMESPACE = "vllm-ssd"  # of the actors' names
REACH_S = 5.0  # timeout of a connection to the cluster's head


def connect(address: str, *, show_logs: bool = False) -> Any:
    """Connect this process to the cluster and return the module ``ray``. show_logs: show what this
    process's actors print. Raises ``ValueError`` with a sentence."""
    # A call after the connection is lost would start a Ray here. Ray reads this when imported.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    ending = signal.getsignal(signal.SIGTERM)
    try:
        _knock(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        ray.init(address, namespace=NAMESPACE, logging_level="WARNING", log_to_driver=show_logs)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ValueError(
            f"no Ray cluster is reached at {address} ({sentence(error)}): start one with 'ray "
            "start' on every node, or name its address"
        ) from error
    signal.signal(signal.SIGTERM, ending)  # Ray's own handler would abort the process
    return ray


def _knock(address: str) -> None:
    """Raise ``OSError`` if nobody listens at HOST:PORT: Ray would try it for ever."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()


def site_name(name: str, place: int) -> str:
    """Name of the actor of draft number ``place`` of the service ``name``."""
    return f"{name}/{place}"


def find_sites(name: str) -> list[Any]:
    """The actors of all drafts of the service ``name``. Raises Ray's errors."""
    import ray

    found = []
    for actor in sorted(ray.util.list_named_actors()):
        if actor.rpartition("/")[0] == name:
            try:
                found.append(ray.get_actor(actor))
            except ValueError:
                pass  # it has just ended
    return found


def sentence(error: Exception) -> str:
    """The first line of an actor's own error, without the traceback that Ray puts around it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
