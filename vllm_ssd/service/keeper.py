"""The keeper: the process that owns the draft's Ray and restarts a lost draft.

The engine core starts it and talks to it over one socket pair. The keeper owns Ray because Ray
brings threads, signal handlers and exit hooks, and forking workers is unsafe after threads start.
The socket closes however the engine core dies. The keeper then ends the draft and cleans up.

Ray notices that the draft server has ended but not that it hangs. Ray itself may end while the
server's process lives on. So the keeper also watches the heartbeat in the table, and kills the
server by its pid: two servers must never write to one table.

The keeper sends these kinds of lines to the engine core:
- ``awaited``: the step that a start waits for now.
- ``ready``: the draft serves, after the first start or after a loss.
- ``lost``: a sentence about a loss, after which a start follows.
- ``failed``: why there is no draft, and none will be started.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from vllm_ssd.service.detached import detach, is_closed, say
from vllm_ssd.service.launch import PAUSE_S, Restarts
from vllm_ssd.service.own_ray import (
    DraftLost,
    OwnRay,
    RayLost,
    UsersRay,
    has_ended,
    place,
    sentence,
    set_environment,
)
from vllm_ssd.service.own_table import engines_of
from vllm_ssd.service.server import DraftServer
from vllm_ssd.service.server_spec import ServerSpec
from vllm_ssd.table import ASLEEP, FOR_GOOD, SpeculationTable, rundir

# Prefixes of variables that are for the target only. With VLLM_DP_* vLLM would make the draft join
# the target's data parallel group. The target's text does not depend on whether drafts are batch
# invariant, and batch invariant kernels are slower.
_OF_TARGET = ("VLLM_DP_", "VLLM_BATCH_INVARIANT")
POLL_S = 0.2
# Without a heartbeat for so long, a draft hangs. Several times the longest forward.
HANG_S = 20.0
SAY_AGAIN_S = 60.0  # between reports of a killed process: its GPU driver may never let it end
_LOST = "is lost ({}); serving goes on without drafts while it is started again"
_NOT_BACK = "could not be started again ({}); it is tried once more"
_STAYS = (
    "was killed {:.0f} s ago and its process has not ended, as its device does not let it; serving "
    "goes on without drafts, and none is started before it has"
)


class OwnerGone(Exception):
    """No process needs the draft any more."""


class Keeper:
    """Runs one draft server after the other, reports their state, and takes the last one down."""

    _ray: Any
    _status: Any  # the draft's part of its table

    def __init__(self, spec: ServerSpec, channel: socket.socket, own_ray: OwnRay | UsersRay):
        self._own_ray = own_ray
        self._spec = spec
        self._channel = channel
        self._name = spec.name  # if set, the draft stays while an engine has it in its table
        self._actor: Any = None
        self._process: psutil.Process | None = None  # the server's
        self._asleep = False  # the last server slept, and the next one begins so

    def run(self) -> None:
        """Keep the draft until the engine core closes the channel and no engine needs the draft, or
        until SIGTERM. Then the engine core keeps the files for another keeper, unless it ends."""
        try:
            self._keep()
        except OwnerGone:
            pass
        except Exception as error:  # the engine core must be told of every error
            self._say("failed", sentence(error))
            raise
        finally:
            self._kill()
            self._own_ray.stop()
            if sys.exc_info()[0] is not SystemExit or is_closed(self._channel):
                rundir.remove(Path(self._spec.run_dir))
                # vLLM may have killed the engines, and the keeper outlives them to remove their
                # files.
                rundir.sweep()

    def _keep(self) -> NoReturn:
        """Run one draft server after the other, until ``OwnerGone``."""
        import ray  # takes a second, so processes that only import this module skip it

        self._ray = ray
        # On ROCm, Ray starts only if both ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are set.
        os.environ |= self._spec.environment
        table = rundir.table_path(Path(self._spec.run_dir))
        self._status = SpeculationTable.open(table).draft[0]
        restarts = Restarts(self._spec.max_restarts)
        first = not self._status["pid"]
        if not first:
            self._take_over(table)
        while True:
            served = False
            try:
                text = self._load(first)
                task = self._actor.serve.remote()
                restarts.served()
                self._say("ready", text)
                first, served, self._asleep = False, True, False
                raise DraftLost(self._result(task, self._spec.start_timeout_s))
            except DraftLost as error:
                final = first and not isinstance(error, RayLost)  # it would fail again
                again = not final and restarts.again()
                if not again:
                    self._say("failed", str(error))
                elif first:
                    self._say("awaited", f"the draft's Ray, which is started again ({error})")
                else:
                    self._say("lost", (_LOST if served else _NOT_BACK).format(error))
            self._bury()
            if not again:
                self._status["away"] = FOR_GOOD
                self._name = ""  # no draft is left for the other engines
            self._rest(PAUSE_S if again else None)

    def _load(self, first: bool) -> str:
        """Start a server and return its line when it has loaded the draft. Raises ``DraftLost``."""
        self._status["restarts"] += not first
        self._say("awaited", "the draft's Ray")
        try:
            self._own_ray.start()
        except DraftLost:
            raise
        except Exception as error:  # Ray raises errors of many kinds
            raise RayLost(f"Ray could not be started: {sentence(error)}") from error
        self._say("awaited", "the draft model")
        self._actor = place(DraftServer).remote(self._spec)
        # The engine core applies its own timeout to the first start.
        limit_s = math.inf if first else self._spec.start_timeout_s
        try:
            self._process = psutil.Process(int(self._result(self._actor.pid.remote(), limit_s)))
        except psutil.NoSuchProcess as error:
            raise DraftLost("its process has ended") from error
        text = self._result(self._actor.load.remote(self._asleep), limit_s)
        self._own_ray.check_listeners()
        return text

    def _result(self, task: Any, loading_s: float) -> str:
        """Wait for the text of the server's task. Raises ``DraftLost`` if the server has ended or
        hangs. loading_s: timeout of a load; the heartbeat is 0 in it, if the draft does not sleep.
        """
        beat = polls = 0
        while True:
            if not self._own_ray.lives():
                raise RayLost("its Ray has ended")
            try:
                if self._ray.wait([task], timeout=0)[0]:
                    return str(self._ray.get(task))
            except self._ray.exceptions.RayError as error:
                raise DraftLost(sentence(error)) from error
            # Counts polls, not seconds: the clock goes on while the whole container is frozen.
            before, beat = beat, int(self._status["heartbeat"])
            asleep = not beat and self._status["away"] == ASLEEP
            polls = 0 if asleep or beat != before else polls + 1
            if beat and polls * POLL_S > HANG_S:
                raise DraftLost(f"no sign of life for {HANG_S:g} s")
            if not beat and polls * POLL_S > loading_s:
                self._kill()
                self._own_ray.stop()  # it may be the part that hangs
                limit = f"{loading_s:g} s (start_timeout_s)"
                raise DraftLost(f"the draft model was not ready within {limit}")
            self._rest(POLL_S)

    def _take_over(self, table: Path) -> None:
        """End the server of a killed keeper, which the kernel ends, too: its Ray has ended."""
        with suppress(psutil.Error):
            process = psutil.Process(int(self._status["pid"]))
            # Another process may have this pid by now. The server is the one that has the table.
            try:
                is_ours = any(part.path == str(table) for part in process.memory_maps())
            except psutil.ZombieProcess:  # of which threads may be left, and nothing says more
                is_ours = True
            self._process = process if is_ours else None
        self._bury()

    def _kill(self) -> None:
        """Kill the server's process, even if it hangs."""
        if self._actor is not None and self._own_ray.lives():
            self._ray.kill(self._actor)
        self._actor = None
        if self._process is not None:
            # Ray's kill does not end a process that SIGSTOP has stopped.
            with suppress(psutil.NoSuchProcess):
                self._process.kill()

    def _bury(self) -> None:
        """Kill the server and wait until its process has ended and can no longer write to the
        table. Then clear the heartbeat, so that targets skip waiting for drafts."""
        self._kill()
        killed = said = time.monotonic()
        while self._process is not None and not has_ended(self._process, wholly=True):
            if time.monotonic() - said >= SAY_AGAIN_S:
                said = time.monotonic()
                self._say("lost", _STAYS.format(said - killed))
            self._rest(POLL_S)
        if self._process is not None:
            self._status["pid"] = self._process.pid  # also for a server that never served
        self._process = None
        self._asleep |= bool(self._status["away"] == ASLEEP)
        self._status["heartbeat"] = self._status["away"] = 0

    def _rest(self, seconds: float | None) -> None:
        """Sleep for ``seconds``, None = for ever; ``OwnerGone`` once no process needs the draft."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while is_closed(self._channel, seconds):
            if not (self._name and engines_of(self._name)):
                raise OwnerGone
            # The engine that started the draft is gone, but other engines still share the draft.
            pause = min(POLL_S, deadline - time.monotonic())
            if pause <= 0:
                return
            time.sleep(pause)

    def _say(self, kind: str, text: str) -> None:
        say(self._channel, kind, text)  # if nobody hears it, the next ``_rest`` finds that out


def keep_in_thread(spec: ServerSpec, locks: Iterable[int]) -> socket.socket:
    """Start a keeper in a thread of an actor of the user's Ray. Returns the channel to it."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            Keeper(spec, theirs, UsersRay()).run()

    threading.Thread(target=run, name="ssd-keeper-of-draft", daemon=True).start()
    return ours


def main() -> None:
    """Entry point. ``launch.py`` runs this module by ``start_detached``."""
    channel, spec = detach(ServerSpec)
    # Ctrl-C reaches the whole terminal; the engine core decides when the draft ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in [name for name in os.environ if name.startswith(_OF_TARGET)]:
        del os.environ[name]
    set_environment()
    # SIGTERM also ends the draft: sys.exit leaves through the ``finally`` of ``run``.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Keeper(spec, channel, OwnRay(Path(spec.run_dir))).run()


if __name__ == "__main__":
    from vllm_ssd.service.keeper import main as _main  # so that Ray pickles by the module's name

    _main()
