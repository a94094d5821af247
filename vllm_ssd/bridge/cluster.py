"""Connects a process to the user's Ray cluster, where the drafts of a service have names."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import Any

import psutil

from vllm_ssd.log import get_logger
from vllm_ssd.service.own_ray import sentence
from vllm_ssd.table import rundir

logger = get_logger(__name__)

NAMESPACE = "vllm-ssd"  # of the actors' names
_OWN_RAY = re.compile(rf"socket_name=\S*/{rundir.NAMES}/ray/")  # in a raylet's command
REACH_S = 40.0  # timeout of the connection, which takes seconds


def connect(address: str, *, show_logs: bool = False) -> Any:
    """Connect this process to the cluster and return the module ``ray``. show_logs: show what this
    process's actors print. Raises ``ValueError`` with a sentence. Ends this process with a sentence
    if the cluster does not answer."""
    # A call after the connection is lost would start a Ray here. Ray reads this when imported.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    limit = threading.Timer(REACH_S, _give_up, [address])
    limit.daemon = True
    limit.start()
    ending = signal.getsignal(signal.SIGTERM)
    try:
        if address == "auto" and not os.environ.get("RAY_ADDRESS") and _only_own_rays():
            raise ConnectionError("only drafts' own Rays run on this node")
        ray.init(address, namespace=NAMESPACE, logging_level="WARNING", log_to_driver=show_logs)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ValueError(
            f"no Ray cluster is reached at {address} ({sentence(error)}): start one with 'ray "
            "start' on every node, or name its address"
        ) from error
    finally:
        limit.cancel()
    signal.signal(signal.SIGTERM, ending)  # Ray's own handler would abort the process
    return ray


def _only_own_rays() -> bool:
    """Whether this node has drafts' own Rays and no other. Ray's "auto" would take one of them."""
    found = [p.info for p in psutil.process_iter(["name", "cmdline"]) if p.info["name"] == "raylet"]
    return bool(found) and all(_OWN_RAY.search(" ".join(each["cmdline"] or ())) for each in found)


def _give_up(address: str) -> None:
    """End this process with a sentence. Ray would try for ever, and cannot be interrupted."""
    logger.error(
        "SSD: the Ray cluster at %s does not answer within %g s: see 'ray status', or name its "
        "address",
        address,
        REACH_S,
    )
    os._exit(2)


def find_sites(name: str) -> list[Any]:
    """The actors of all drafts of the service ``name``, which are called ``name/0``, ``name/1`` and
    so on. Raises Ray's errors."""
    import ray

    found = []
    for actor in sorted(ray.util.list_named_actors()):
        if actor.rpartition("/")[0] == name:
            try:
                found.append(ray.get_actor(actor))
            except ValueError:
                pass  # it has just ended
    return found


def statuses(sites: list[Any], limit_s: float) -> list[tuple[Any, list[int]]]:
    """The actors that answer within ``limit_s`` seconds, each with the status of its draft."""
    import ray

    found = []
    asked = {site.status.remote(): site for site in sites}
    for task in ray.wait([*asked], num_returns=len(asked), timeout=limit_s)[0] if asked else []:
        try:
            status = ray.get(task)
        except ray.exceptions.RayError:
            continue
        if status is not None:  # it has a table
            found.append((asked[task], status))
    return found
