"""The draft server as Ray runs it: an actor, in a Ray of its own.

Ray notices that the server has ended but not that it hangs, and Ray itself may end while the
server's process lives on. So the process is watched directly too, and killed when it is no longer
wanted: two servers must never write to one table.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil

from vllm_ssd.lifecycle.own_ray import OwnRay, Reachable, has_ended, token_path
from vllm_ssd.lifecycle.server import DraftServer
from vllm_ssd.lifecycle.server_spec import ServerSpec
from vllm_ssd.protocol import ASLEEP, FOR_GOOD, SpeculationTable, rundir
from vllm_ssd.protocol.messages import ControlClient, Stop, endpoint

STOP_S = 3.0  # for a server to end by itself
POLL_S = 0.2


class DraftLost(Exception):
    """The draft server has ended, hangs or could not be started; the message says why."""


class RayLost(DraftLost):
    """Ray could not be started, or has ended. Ray takes ports that it found free a little before,
    which can be another's by then: it may come up at the next try."""


class DraftActor:
    """One draft server at a time: ``start``, ``serve``, ``kill`` when it is lost, then again."""

    def __init__(self, spec: ServerSpec, start_timeout_s: float):
        """start_timeout_s: seconds for loading the draft again in a server that serves."""
        import ray  # which takes a second: not in processes that only import this module

        self._ray: Any = ray
        self._spec = spec
        self._start_timeout_s = start_timeout_s
        self._run_dir = Path(spec.run_dir)
        self._own_ray = OwnRay(self._run_dir)
        self._status = SpeculationTable.open(rundir.table_path(self._run_dir)).draft[0]
        self._actor: Any = None
        self._pid: Any = None
        self._task: Any = None  # the one that it runs now
        self._process: psutil.Process | None = None
        self._serving = False
        self._beat = self._looks = 0  # the last heartbeat, and the looks since it changed
        # Inherited by Ray and the server. Ray on ROCm does not even start where the environment has
        # ROCR_VISIBLE_DEVICES without HIP_VISIBLE_DEVICES.
        os.environ.update(spec.environment)

    def take_over(self) -> None:
        """Kill the server of a keeper that was killed, if it is still there: to be buried first."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(self._status["pid"]))
            # The number may be a stranger's by now. The token's path is of this engine only.
            if str(token_path(self._run_dir)) in process.environ().values():
                self._process = process
        self.kill()

    def start(self, again: bool = False) -> None:
        """Begin to load the draft in a new server, and in a new Ray if there is none; ``RayLost``
        if that cannot be started, ``DraftLost`` if others could reach it. again: the server before
        was lost."""
        self._status["restarts"] += again
        if not self._own_ray.lives():
            try:
                self._own_ray.start()
            except Reachable as error:
                raise DraftLost(str(error)) from error
            except Exception as error:  # Ray's are of many kinds
                raise RayLost(f"Ray could not be started: {sentence(error)}") from error
        actor = self._ray.remote(DraftServer).options(num_cpus=0, num_gpus=0, max_restarts=0)
        self._actor = actor.remote(self._spec)
        self._pid = self._actor.pid.remote()
        self._task = self._actor.load.remote()

    def serve(self) -> None:
        """Have the loaded draft serve; ``DraftLost`` if others can reach what has been started
        beside it."""
        try:
            self._own_ray.check_listeners()
        except Reachable as error:
            raise DraftLost(str(error)) from error
        self._task = self._actor.serve.remote()
        self._serving = True
        self._looks = 0

    def result(self) -> str | None:
        """What the server's task returned, None while it runs; ``DraftLost`` if it will not return.
        To be called every ``POLL_S`` seconds."""
        if not self._own_ray.lives():
            raise RayLost("its Ray has ended")
        try:
            if self._process is None and self._done(self._pid):
                self._process = psutil.Process(self._ray.get(self._pid))
            if self._done(self._task):
                return str(self._ray.get(self._task))
        except self._ray.exceptions.RayError as error:
            raise DraftLost(sentence(error)) from error
        except psutil.NoSuchProcess as error:
            raise DraftLost("its process has ended") from error
        # Counts looks and not seconds, as the clock goes on while the whole container is frozen.
        before, self._beat = self._beat, int(self._status["heartbeat"])
        # A draft that sleeps, or loads its weights again, has set its heartbeat to 0.
        asleep = not self._beat and int(self._status["away"]) == ASLEEP
        self._looks = 0 if asleep or self._beat != before else self._looks + 1
        limit_s = self._spec.hang_s if self._beat else self._start_timeout_s
        if self._serving and self._looks * POLL_S > limit_s:
            raise DraftLost(
                f"no sign of life for {limit_s:g} s"
                if self._beat
                else f"it was not loaded again within {limit_s:g} s (start_timeout_s)"
            )
        return None

    def kill(self) -> None:
        """Kill the server's process, even if it hangs."""
        if self._actor is not None and self._own_ray.lives():
            self._ray.kill(self._actor)
        if self._process is not None:
            # Ray's kill does not end a process that is stopped by SIGSTOP.
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()
        self._actor = self._pid = self._task = None
        self._serving = False

    def gone(self) -> bool:
        """Whether a killed server's process has ended, so that nobody writes to the table any more.
        If so, clears the heartbeat, so that the target does not wait for drafts."""
        if self._process is not None:
            if not has_ended(self._process):
                return False
            self._status["pid"] = self._process.pid  # also of one that never served
        self._process = None
        self._status["heartbeat"] = self._status["away"] = 0
        return True

    def give_up(self) -> None:
        """Say in the table that there will be no other server."""
        self._status["away"] = FOR_GOOD

    def close(self) -> None:
        """Have the server stop, make sure that it has, and end Ray."""
        if self._serving and self._own_ray.lives():
            control = ControlClient(endpoint(self._run_dir))
            control.send(Stop())
            self._ray.wait([self._task], timeout=STOP_S)
            control.close()
        self.kill()
        self._own_ray.stop()

    def _done(self, task: Any) -> bool:
        return bool(self._ray.wait([task], timeout=0)[0])


def sentence(error: Exception) -> str:
    """The draft's own words out of an error that Ray wrapped in a traceback."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
