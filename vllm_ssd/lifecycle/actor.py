"""Runs the draft server as an actor in a private Ray instance, and detects when it is lost.

Ray notices that the server has ended but not that it hangs. Ray itself may end while the server's
process lives on. So this module also watches the process directly and kills it when it is lost or
stopped: two servers must never write to one table.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import psutil

from vllm_ssd.lifecycle.own_ray import (
    DraftLost,
    OwnRay,
    UsersRay,
    has_ended,
    sentence,
    token_path,
)
from vllm_ssd.lifecycle.server import DraftServer
from vllm_ssd.lifecycle.server_spec import ServerSpec
from vllm_ssd.protocol import ASLEEP, FOR_GOOD, SpeculationTable, rundir
from vllm_ssd.protocol.messages import ControlClient, Stop, endpoint

STOP_S = 3.0  # for a server to end by itself
POLL_S = 0.2
# Without a heartbeat for so long, a draft hangs. Several times the longest forward.
HANG_S = 20.0


class RayLost(DraftLost):
    """Ray could not be started, or has ended. Ray picks free ports and opens them a little later,
    when another process may have taken them, so the next start may succeed."""


class DraftActor:
    """Runs one draft server at a time: ``start``, ``serve``, ``kill`` if it is lost, and again."""

    def __init__(self, spec: ServerSpec, own_ray: OwnRay | UsersRay):
        import ray  # takes a second, so processes that only import this module skip it

        self._ray: Any = ray
        self._spec = spec
        self._run_dir = Path(spec.run_dir)
        self._own_ray = own_ray
        own_ray.set_variables(spec.environment)
        self._status = SpeculationTable.open(rundir.table_path(self._run_dir)).draft[0]
        self._actor: Any = None
        self._pid: Any = None
        self._task: Any = None  # the actor task that runs now
        self._process: psutil.Process | None = None
        self._serving = False
        self._beat = self._polls = 0  # the last heartbeat, and the polls since it changed

    def take_over(self) -> bool:
        """Whether a killed keeper had a server. If that still runs, kills it: it must end before a
        new start."""
        pid = int(self._status["pid"])
        if not pid:
            return False
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            # Another process may have this pid by now. Only this engine's have the token's path.
            if str(token_path(self._run_dir)) in process.environ().values():
                self._process = process
        self.kill()
        return True

    def start(self, again: bool = False) -> None:
        """Start a server and begin to load the draft; starts Ray if it does not run. Raises
        ``RayLost`` if Ray cannot be started, ``DraftLost`` if other machines could reach it. again:
        the previous server was lost."""
        self._status["restarts"] += again
        if not self._own_ray.lives():
            try:
                self._own_ray.start()
            except DraftLost:
                raise
            except Exception as error:  # Ray raises errors of many kinds
                raise RayLost(f"Ray could not be started: {sentence(error)}") from error
        placed = self._own_ray.options()
        actor = self._ray.remote(DraftServer).options(num_cpus=0, num_gpus=0, **placed)
        self._actor = actor.remote(self._spec)
        self._pid = self._actor.pid.remote()
        self._task = self._actor.load.remote()

    def serve(self) -> None:
        """Let the loaded draft serve. Raises ``DraftLost`` if other machines can reach the draft's
        Ray or one of its processes."""
        self._own_ray.check_listeners()
        self._task = self._actor.serve.remote()
        self._serving = True
        self._polls = 0

    def result(self) -> str | None:
        """The text that the server's task returned, None while it runs. Raises ``DraftLost`` if the
        server ended or hangs. Call it every ``POLL_S`` seconds."""
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
        # Counts polls, not seconds: the clock goes on while the whole container is frozen.
        before, self._beat = self._beat, int(self._status["heartbeat"])
        # A draft that sleeps or reloads its weights has set its heartbeat to 0.
        asleep = not self._beat and int(self._status["away"]) == ASLEEP
        self._polls = 0 if asleep or self._beat != before else self._polls + 1
        limit_s = HANG_S if self._beat else self._spec.start_timeout_s
        if self._serving and self._polls * POLL_S > limit_s:
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
            # Ray's kill does not end a process that SIGSTOP has stopped.
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()
        self._actor = self._pid = self._task = None
        self._serving = False

    def gone(self) -> bool:
        """Whether the killed server's process has ended and can no longer write to the table. If
        so, clears the heartbeat, so that targets skip waiting for drafts."""
        if self._process is not None:
            if not has_ended(self._process):
                return False
            self._status["pid"] = self._process.pid  # also for a server that never served
        self._process = None
        self._status["heartbeat"] = self._status["away"] = 0
        return True

    def give_up(self) -> None:
        """Record in the table that no further server will be started."""
        self._status["away"] = FOR_GOOD

    def close(self) -> None:
        """Stop the server, kill it if it does not stop in ``STOP_S`` seconds, and end Ray."""
        if self._serving and self._own_ray.lives():
            control = ControlClient(endpoint(self._run_dir))
            control.send(Stop())
            self._ray.wait([self._task], timeout=STOP_S)
            control.close()
        self.kill()
        self._own_ray.stop()

    def _done(self, task: Any) -> bool:
        return bool(self._ray.wait([task], timeout=0)[0])
