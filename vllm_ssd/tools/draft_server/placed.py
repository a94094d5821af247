"""Runs a draft on a node of the user's Ray cluster; Ray chooses the node.

The command makes the keys, passes them to the node through Ray and writes the key file where the
command runs, so the user copies no file. A Ray actor owns the draft's processes, which end with it
however it ends. Ray ends the actor when the command ends. If the actor's node is lost, the command
places the draft again and writes its new address to the key file.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from typing import Any

import msgspec
from vllm.platforms import current_platform

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.lifecycle.actor import sentence
from vllm_ssd.lifecycle.restarts import Restarts
from vllm_ssd.lifecycle.server_spec import absolute
from vllm_ssd.log import get_logger
from vllm_ssd.relay.keys import KeyFile, addresses_of, make_keys, read_keys, write_keys
from vllm_ssd.tools.draft_server.configs import devices, make_configs
from vllm_ssd.tools.draft_server.serving import LocalDrafts

logger = get_logger(__name__)

STOP_S = 25.0  # timeout for the draft's end on its node
SAY_S = 30.0  # between two log lines that no node has room or that the draft still loads
RESTARTS = 3  # consecutive placements of a lost actor; --max-restarts limits the draft's process


class DraftOnNode:
    """The actor on the chosen node: ``address``, ``serve``, ``tend`` now and then, ``stop``."""

    def __init__(self) -> None:
        self._drafts: LocalDrafts | None = None

    def address(self) -> str:
        """This node's address in Ray, written for HOST:PORT."""
        import ray

        address = str(ray.util.get_node_ip_address())
        return f"[{address}]" if ":" in address else address

    def serve(self, args: argparse.Namespace, keys: KeyFile) -> list[str]:
        """Load the drafts and return the addresses at which they listen. Raises ``ValueError`` or
        ``RuntimeError`` with a sentence if that fails."""
        _take_niceness_of_others()
        self._drafts = LocalDrafts(make_configs(args), args.name, keys)
        try:
            self._drafts.start()
        except BaseException:
            self.stop()
            raise
        return keys.addresses

    def tend(self) -> bool:
        """Check the drafts and their relays; False if all drafts are lost for good."""
        return self._drafts is not None and self._drafts.tend()

    def stop(self) -> None:
        """End the drafts and remove their files on this node."""
        if self._drafts is not None:
            self._drafts.stop()


class PlacedDraft:
    """Drafts on another node. Call ``start``, ``tend`` now and then, and ``stop`` at any time."""

    def __init__(self, args: argparse.Namespace):
        """Raises ``ValueError`` with a sentence if the key file belongs to another service."""
        self._args = args
        self._labels = labels(args.ray_labels)
        path = args.key_file
        # Engines may have copies of a key file that exists.
        self._keys = read_keys(path, args.name) if path.exists() else make_keys(args.name, [])
        self._count = len(devices(args.device))
        if args.listen is not None:
            addresses_of(args.listen, self._count)
        self._restarts = Restarts(RESTARTS)
        self._actor: Any = None
        self._serving = False
        self._again_at = 0.0

    def start(self) -> None:
        """Place the draft and wait until it is loaded; ``ValueError`` with a sentence if not."""
        import ray

        self._ray: Any = ray
        ending = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(self._args.ray_address, logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ValueError(
                f"no Ray cluster is reached at --ray-address {self._args.ray_address} "
                f"({sentence(error)}): start one with 'ray start', or name its address"
            ) from error
        signal.signal(signal.SIGTERM, ending)  # Ray's own handler would abort the process
        given = self._args.start_timeout_s  # the node refuses what is no number
        self._place(given if isinstance(given, (int, float)) else SSDConfig.start_timeout_s)
        self._restarts.served()

    def tend(self) -> bool:
        """Place the draft again if its node is lost. Returns False if it is lost for good."""
        try:
            if self._serving:
                return bool(self._ray.get(self._actor.tend.remote()))
            if time.monotonic() < self._again_at:
                return True
            self._place()
        except (self._ray.exceptions.RayError, ValueError) as error:
            return self._lost(error)
        self._restarts.served()
        logger.warning("SSD: the draft is back, at %s", ", ".join(self._keys.addresses))
        return True

    def stop(self) -> None:
        """End the draft, remove its files on its node and leave the cluster. The key file stays."""
        if self._actor is None:
            return
        if self._serving:
            try:
                self._ray.get(self._actor.stop.remote(), timeout=STOP_S)
            except self._ray.exceptions.RayError as error:
                logger.error("SSD: the draft's node did not answer (%s)", sentence(error))
        self._drop()
        self._ray.shutdown()

    def _lost(self, error: Exception) -> bool:
        """Log a loss and return whether the draft will be placed again after a pause."""
        what = "the draft's node is lost" if self._serving else "the draft was not placed again"
        logger.error("SSD: %s (%s)", what, sentence(error))
        self._drop()
        pause = self._restarts.pause()
        self._again_at = time.monotonic() + (pause or 0.0)
        return pause is not None

    def _place(self, limit_s: float = math.inf) -> None:
        """Place the draft within ``limit_s`` seconds and load it; ``ValueError`` if that fails."""
        options = {
            "num_cpus": 1,
            "num_gpus": 0 if current_platform.is_cpu() else self._count,
            "label_selector": self._labels,
        }
        self._actor = self._ray.remote(DraftOnNode).options(**options).remote()
        try:
            node = self._node(limit_s)
            addresses = addresses_of(self._args.listen or f"{node}:0", self._count)
            keys = msgspec.structs.replace(self._keys, addresses=addresses)
            args = argparse.Namespace(**vars(self._args) | {"model": absolute(self._args.model)})
            logger.info("SSD: Ray has placed the draft on %s", node)
            serving = self._actor.serve.remote(args, keys)
            addresses = self._wait_for(serving, f"the draft on {node}, which is loaded there")
        except self._ray.exceptions.RayTaskError as error:
            raise ValueError(str(error.cause)) from error
        except self._ray.exceptions.RayError as error:  # for example, the node is lost
            raise ValueError(sentence(error)) from error
        self._keys = msgspec.structs.replace(keys, addresses=addresses)
        write_keys(self._args.key_file, self._keys)
        self._serving = True

    def _node(self, limit_s: float) -> str:
        """Wait until a node has room for the actor, and return that node's address. Ray would wait
        for ever: ``ValueError`` after ``limit_s`` seconds."""
        labels = "" if not self._labels else f" with the labels {self._args.ray_labels}"
        what = f"a node of the Ray cluster{labels} with a free GPU, or on CPUs a free CPU"
        return str(self._wait_for(self._actor.address.remote(), what, limit_s))

    def _wait_for(self, task: Any, what: str, limit_s: float = math.inf) -> Any:
        """Wait for a task's result; log every ``SAY_S`` seconds what the command waits for."""
        deadline = time.monotonic() + limit_s
        while not self._ray.wait([task], timeout=min(SAY_S, limit_s))[0]:
            if time.monotonic() >= deadline:
                limit = f"{limit_s:g} s (--start-timeout-s)"
                raise ValueError(f"there was not within {limit} {what}: see 'ray status'")
            logger.warning("SSD: waiting for %s", what)
        return self._ray.get(task)

    def _drop(self) -> None:
        """Let Ray end the actor if it has not ended."""
        if self._actor is not None:
            self._ray.kill(self._actor)
        self._actor = None
        self._serving = False


def _take_niceness_of_others() -> None:
    """Set niceness 0 for this thread and all that it starts, if this user may. With the niceness of
    Ray's workers, a draft would hardly load next to busy processes."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        logger.warning(
            "SSD: the draft has niceness %d, as Ray's workers have, and this user may not lower "
            "it: if other programs keep all cores of its node busy, start that node with "
            "RAY_worker_niceness=0",
            niceness,
        )


def labels(text: str | None) -> dict[str, str]:
    """Node labels from "KEY=VALUE,..."; ``ValueError`` with a sentence if the text is malformed."""
    found = {}
    for part in filter(None, (text or "").split(",")):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ValueError(
                f"--ray-labels {text!r} is not KEY=VALUE,KEY=VALUE, as in draft=yes: name labels "
                "that 'ray start --labels' has given to a node"
            )
        found[key] = value
    return found
