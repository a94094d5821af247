"""Runs drafts in the user's Ray cluster; Ray chooses their nodes.

Each draft has an actor, a ``DraftOnNode``, on its node. Ray ends the actors when the command ends.
If a node or an actor is lost, the command has Ray place that draft again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Generator
from typing import Any

from vllm.platforms import current_platform

from vllm_ssd.bridge.cluster import connect
from vllm_ssd.bridge.site import THREADS, Site
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.log import get_logger
from vllm_ssd.service.cores import take_niceness_of_others
from vllm_ssd.service.keeper import keep_in_thread
from vllm_ssd.service.launch import Restarts
from vllm_ssd.service.own_ray import sentence
from vllm_ssd.service.server_spec import absolute
from vllm_ssd.table.draft_names import DraftName
from vllm_ssd.tools.draft_server.serving import LocalDrafts, devices, make_configs

logger = get_logger(__name__)

STOP_S = 25.0  # timeout for a draft's end on its node
ANSWER_S = 60.0  # timeout of ``tend``, which first ends silent sessions
SAY_S = 30.0  # between two log lines that no node has room or that the draft still loads
LOOK_S = 0.2  # between two looks whether it has
RESTARTS = 3  # consecutive placements of a lost actor; --max-restarts limits the draft's process


class PlacedDrafts:
    """The drafts of one ``vllm-ssd draft --ray-address``. Call ``start``, ``wait_ready``, ``tend``
    now and then, and ``stop`` at any time."""

    def __init__(self, args: argparse.Namespace):
        """Raises ``ValueError`` with a sentence if a flag is invalid."""
        options = {
            "num_cpus": 1,
            "num_gpus": 0 if current_platform.is_cpu() else 1,
            "label_selector": labels(args.ray_labels),
            "max_concurrency": THREADS,
        }
        self._address = args.ray_address
        named = devices(args.device) if args.device else [None]  # that node has its own default
        # All drafts have one service's identifier.
        service = DraftName(args.name, None).service
        args = argparse.Namespace(**vars(args), service=service)
        self._drafts = [_Draft(args, options, *each) for each in enumerate(named)]
        self._ray: Any = None

    def start(self) -> None:
        """Connect to the cluster; ``ValueError`` with a sentence if it is not there."""
        self._ray = connect(self._address, show_logs=True)

    def wait_ready(self) -> None:
        """Place and load all drafts, one after the other; ``ValueError`` with a sentence if one
        fails."""
        for draft in self._drafts:
            draft.start(self._ray)

    def tend(self) -> bool:
        """Place drafts again whose node is lost. Returns False if all are lost for good."""
        lives = [draft.tend() for draft in self._drafts]
        return any(lives)

    def stop(self) -> None:
        """End the drafts, remove their files on their nodes and leave the cluster."""
        if self._ray is not None:
            for draft in self._drafts:
                draft.stop()
            self._ray.shutdown()


class _Draft:
    """One of them. options: of its actor. place: its number. device: what the user named for it."""

    _ray: Any

    def __init__(
        self, args: argparse.Namespace, options: dict[str, Any], place: int, device: str | None
    ):
        own = {"model": absolute(args.model), "device": device}
        if options["num_gpus"]:
            own["device"] = "0"  # its node's actor sees only the GPU that Ray gives it
        self._args = argparse.Namespace(**vars(args) | own)
        self._options = {**options, "name": f"{args.name}/{place}"}
        self._restarts = Restarts(RESTARTS)
        self._actor: Any = None
        self._placing: Generator[None, None, None] | None = None
        self._serving = False
        self._given_up = False
        self._tended = 0.0

    def start(self, ray: Any) -> None:
        """Place the draft and wait until it is loaded; ``ValueError`` with a sentence if not."""
        self._ray = ray
        given = self._args.start_timeout_s  # the node refuses what is no number
        list(self._place(given if isinstance(given, (int, float)) else SSDConfig.start_timeout_s))

    def tend(self) -> bool:
        """Place the draft again if its node is lost. Returns False if it is lost for good."""
        try:
            if self._serving:
                before, self._tended = self._tended, time.monotonic()
                answer = self._actor.tend.remote(min(self._tended - before, 1.0))
                # Without the timeout, a frozen node would block other drafts.
                return self._ray.get(answer, timeout=ANSWER_S)
            if not self._given_up:
                self._placing = self._placing or self._place()
                next(self._placing, None)  # the other drafts need not wait for a node
        except (self._ray.exceptions.RayError, ValueError) as error:
            what = "the draft's node is lost" if self._serving else "the draft was not placed again"
            logger.error("SSD: %s (%s)", what, sentence(error))
            self._drop()
            self._given_up = not self._restarts.again()
        return not self._given_up

    def stop(self) -> None:
        """End the draft and remove its files on its node."""
        if self._serving:
            try:
                self._ray.get(self._actor.stop.remote(), timeout=STOP_S)
            except self._ray.exceptions.RayError as error:
                logger.error("SSD: the draft's node did not answer (%s)", sentence(error))
        self._drop()

    def _place(self, limit_s: float = math.inf) -> Generator[None, None, None]:
        """Place the draft within ``limit_s`` seconds and load it, in steps; else ``ValueError``."""
        again = self._tended > 0
        try:
            self._actor = self._ray.remote(DraftOnNode).options(**self._options).remote()
            node = yield from self._node(limit_s)
            logger.info("SSD: Ray has placed the draft on %s", node)
            serving = self._actor.serve.remote(self._args)
            yield from self._wait_for(serving, f"the draft on {node}, which is loaded there")
        except self._ray.exceptions.RayTaskError as error:
            raise ValueError(str(error.cause)) from error
        except self._ray.exceptions.RayError as error:  # for example, the node is lost
            raise ValueError(sentence(error)) from error
        self._serving = True
        self._tended = time.monotonic()
        self._restarts.served()
        if again:
            logger.warning("SSD: the draft is back, on %s", node)

    def _node(self, limit_s: float) -> Generator[None, None, str]:
        """Wait until a node has room for the actor, and return that node's address. Ray would wait
        for ever: ``ValueError`` after ``limit_s`` seconds."""
        labels = f" with the labels {given}" if (given := self._args.ray_labels) else ""
        what = f"a node of the Ray cluster{labels} with a free GPU, or on CPUs a free CPU"
        return self._wait_for(self._actor.node.remote(), what, limit_s)

    def _wait_for(self, task: Any, what: str, limit_s: float = math.inf) -> Any:
        """Wait for a task's result; log every ``SAY_S`` seconds what the command waits for."""
        begun = said = time.monotonic()
        while not self._ray.wait([task], timeout=min(LOOK_S, limit_s))[0]:
            now = time.monotonic()
            if now >= begun + limit_s:
                limit = f"{limit_s:g} s (--start-timeout-s)"
                raise ValueError(f"there was not within {limit} {what}: see 'ray status'")
            if now >= said + SAY_S:
                said = now
                logger.warning("SSD: waiting for %s", what)
            yield
        return self._ray.get(task)

    def _drop(self) -> None:
        """Let Ray end the actor if it has not ended."""
        if self._actor is not None:
            self._ray.kill(self._actor)
        self._actor, self._placing, self._serving = None, None, False


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


class DraftOnNode(Site):
    """Call ``node`` and ``serve``, then ``tend`` now and then, and at last ``stop``."""

    _drafts: LocalDrafts

    def node(self) -> str:
        """This node's address in Ray."""
        import ray

        return ray.util.get_node_ip_address()

    def serve(self, args: argparse.Namespace) -> None:
        """Load the draft that the flags in ``args`` describe. Raises ``ValueError`` or
        ``RuntimeError`` with a sentence if that fails."""
        take_niceness_of_others()
        configs = make_configs(args)
        self._drafts = drafts = LocalDrafts(configs, args.name, keep_in_thread, args.service)
        try:
            drafts.start()
            self.open(drafts.run_dir, drafts.options, drafts.max_num_seqs)
            drafts.wait_ready()
        except BaseException:
            self.stop()
            raise

    def tend(self, seconds: float) -> bool:
        """End silent sessions; returns False if the draft is lost for good. seconds: see there."""
        self.end_silent(seconds)
        return self._drafts.tend()

    def stop(self) -> None:
        """Also end the draft and remove its files on this node."""
        super().stop()
        self._drafts.stop()
