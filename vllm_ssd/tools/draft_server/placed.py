"""A draft on a node of the user's Ray cluster, which Ray chooses.

The command that has it placed makes the keys, hands them over through Ray and writes the key file
where it runs itself: nothing has to be copied. The draft's processes belong to an actor, whose end,
however it ends, is theirs, and Ray ends the actor with the command. If the actor's node is lost,
the draft is placed again, and the key file has its new address.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from copy import copy
from typing import Any

import msgspec

from vllm_ssd.lifecycle.actor import sentence
from vllm_ssd.lifecycle.restarts import Restarts
from vllm_ssd.lifecycle.server_spec import absolute
from vllm_ssd.log import get_logger
from vllm_ssd.relay.keys import KeyFile, addresses_of, make_keys, read_keys, write_keys
from vllm_ssd.tools.draft_server.configs import devices, make_configs
from vllm_ssd.tools.draft_server.serving import LocalDrafts

logger = get_logger(__name__)

STOP_S = 25.0  # for the draft's end on its node
SAY_S = 30.0  # between two lines that no node has room, or that the draft still loads
RESTARTS = 3  # in a row of an actor that is lost; --max-restarts is about the draft's process
_KEYS = "relay.key"  # in the run directory on the draft's node


class DraftOnNode:
    """The actor: ``address``, ``serve``, ``look`` now and then, ``stop``."""

    def __init__(self) -> None:
        self._drafts: LocalDrafts | None = None

    def address(self) -> str:
        """This node's, as Ray has it, for HOST:PORT."""
        import ray

        address = str(ray.util.get_node_ip_address())
        return f"[{address}]" if ":" in address else address

    def serve(self, args: argparse.Namespace, keys: KeyFile) -> list[str]:
        """Returns once the drafts are loaded: where they listen. ``ValueError`` or ``RuntimeError``
        with a sentence if that fails."""
        _take_niceness_of_others()
        self._drafts = LocalDrafts(make_configs(args), args.name)
        try:
            self._drafts.launch()
            path = self._drafts.run_dirs[0] / _KEYS
            write_keys(path, keys)
            self._drafts.listen(path)
            self._drafts.wait_ready()
            return read_keys(path).addresses
        except BaseException:
            self.stop()
            raise

    def look(self) -> bool:
        """As ``LocalDrafts.look``."""
        return self._drafts is not None and self._drafts.look()

    def stop(self) -> None:
        """Leave nothing behind on this node."""
        if self._drafts is not None:
            self._drafts.stop()


class PlacedDraft:
    """``start``; then ``look`` now and then, until ``stop``, which may be called at any time."""

    def __init__(self, args: argparse.Namespace):
        """``ValueError`` with a sentence if the key file is another service's."""
        self._args = args
        self._labels = labels(args.ray_labels)
        self._keys = self._old_keys() or make_keys(args.name, [])
        self._count = len(devices(args.device))
        if args.listen is not None:
            addresses_of(args.listen, self._count)
        self._restarts = Restarts(RESTARTS)
        self._actor: Any = None
        self._serving = False
        self._again_at = 0.0

    def start(self) -> None:
        """Returns once the draft is loaded; ``ValueError`` with a sentence if that fails."""
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
        signal.signal(signal.SIGTERM, ending)  # Ray's own aborts the process
        self._place()
        self._restarts.served()

    def look(self) -> bool:
        """Place it again if its node is lost; whether it is there, or will be again."""
        try:
            if self._serving:
                return bool(self._ray.get(self._actor.look.remote()))
            if time.monotonic() < self._again_at:
                return True
            self._place()
        except (self._ray.exceptions.RayError, ValueError) as error:
            return self._lost(error)
        self._restarts.served()
        logger.warning("SSD: the draft is back, at %s", ", ".join(self._keys.addresses))
        return True

    def stop(self) -> None:
        """Have it leave nothing behind, and leave the cluster. The key file stays."""
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
        """Whether it is placed again, after a pause."""
        what = "the draft's node is lost" if self._serving else "the draft was not placed again"
        logger.error("SSD: %s (%s)", what, sentence(error))
        self._drop()
        pause = self._restarts.pause()
        self._again_at = time.monotonic() + (pause or 0.0)
        return pause is not None

    def _old_keys(self) -> KeyFile | None:
        """Those of the key file, which engines may have copies of."""
        path = self._args.key_file
        if not path.exists():
            return None
        keys = read_keys(path)
        if keys.name != self._args.name:
            raise ValueError(
                f"{path} is the key file of {keys.name!r}: name another file, or remove this one"
            )
        return keys

    def _place(self) -> None:
        """``ValueError`` with a sentence if the draft cannot be loaded."""
        from vllm.platforms import current_platform

        options = {
            "num_cpus": 1,
            "num_gpus": 0 if current_platform.is_cpu() else self._count,
            "label_selector": self._labels,
        }
        self._actor = self._ray.remote(DraftOnNode).options(**options).remote()
        try:
            node = self._node()
            addresses = addresses_of(self._args.listen or f"{node}:0", self._count)
            keys = msgspec.structs.replace(self._keys, addresses=addresses)
            args = copy(self._args)
            args.model = absolute(args.model)
            logger.info("SSD: Ray has placed the draft on %s", node)
            serving = self._actor.serve.remote(args, keys)
            addresses = self._wait_for(serving, "the draft on %s, which is loaded there", node)
        except self._ray.exceptions.RayTaskError as error:
            raise ValueError(str(error.cause)) from error
        except self._ray.exceptions.RayError as error:  # its node is lost, for example
            raise ValueError(sentence(error)) from error
        self._keys = msgspec.structs.replace(keys, addresses=addresses)
        write_keys(self._args.key_file, self._keys)
        self._serving = True

    def _node(self) -> str:
        """The actor's, once a node has room for it."""
        labels = "" if not self._labels else f" with the labels {self._args.ray_labels}"
        what = (
            "a node of the Ray cluster%s that has a GPU free for the draft, or on CPUs a CPU ('ray "
            "status' shows them)"
        )
        return str(self._wait_for(self._actor.address.remote(), what, labels))

    def _wait_for(self, task: Any, what: str, *words: str) -> Any:
        """The result of a task; what is waited for is said now and then."""
        while not self._ray.wait([task], timeout=SAY_S)[0]:
            logger.warning(f"SSD: waiting for {what}", *words)
        return self._ray.get(task)

    def _drop(self) -> None:
        """Ray ends the actor, if it has not ended."""
        if self._actor is not None:
            self._ray.kill(self._actor)
        self._actor = None
        self._serving = False


def _take_niceness_of_others() -> None:
    """Give what this thread starts the niceness 0, where this user may. Beside busy processes a
    draft with the niceness of Ray's workers would hardly be loaded."""
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
    """Of nodes, out of "KEY=VALUE,..."; ``ValueError`` with a sentence if it is none."""
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
