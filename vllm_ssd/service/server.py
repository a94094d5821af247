"""The draft server: one process, placed by Ray, that loads the draft and runs its engine.

Ray only starts the server, notices its end and can kill it. Work arrives through control sockets
and the speculation tables of the engines that have joined. The server's own table has no requests:
other processes read the draft's state from it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vllm_ssd.log import get_logger
from vllm_ssd.service.cores import take_niceness_of_others
from vllm_ssd.service.quiet import hush_vllm
from vllm_ssd.service.server_spec import ServerSpec
from vllm_ssd.table import ASLEEP, RELOADING, rundir
from vllm_ssd.table.messages import NOT_LOADED, OTHERS_CAME, Join, Leave, Reload, Wake
from vllm_ssd.table.sockets import Sockets

if TYPE_CHECKING:  # torch is imported once the process is pinned
    from vllm_ssd.draft.engine import DraftEngine
    from vllm_ssd.service.served_engine import ServedEngine

logger = get_logger(__name__)

# Seconds between two reads of the table by an idle server. PAUSE_S: requests run, on a CPU (0 on a
# GPU); or PAUSE_SHARE of the time without work, lest reads keep a core busy. LONG_PAUSE_S: at most,
# and on a GPU after 1 s without work, when the target is busy with other requests or stuck. REST_S:
# without requests; a control message ends this wait.
PAUSE_S, PAUSE_SHARE, LONG_PAUSE_S, REST_S = 50e-6, 1 / 20, 2e-3, 0.2
OWNER_CHECK_S = 1.0
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class DraftServer:
    """The draft server, which Ray runs as an actor. Each public method is one actor task."""

    def __init__(self, spec: ServerSpec):
        self._spec = spec
        self._run_dir = Path(spec.run_dir)
        # If the keeper is killed, its Ray ends, and the kernel then kills this process, even if it
        # hangs: another keeper may start another server on the same table.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ |= spec.environment  # in the user's Ray, the keeper has other variables
        take_niceness_of_others()  # as the keeper does in its own Ray
        self._asleep = False
        self._joined: dict[str, ServedEngine] = {}  # by run directory
        if spec.cores:
            # Before torch is imported: torch's threads inherit the cores.
            os.sched_setaffinity(0, spec.cores)

    def pid(self) -> int:
        """Id of the process to kill if this server hangs."""
        return os.getpid()

    def load(self, asleep: bool = False) -> str:
        """Load the draft, unless it sleeps, and return a line that describes it. Errors: see
        ``LoadedDraft.load``."""
        current_process().name = "DraftServer"  # vLLM's log lines begin with it
        hush_vllm()
        gc.disable()  # imports of vLLM leave little garbage: to look for it takes over a second
        try:
            from vllm_ssd.service.loaded_draft import LoadedDraft

            self._draft = LoadedDraft(self._spec)
            line = "it sleeps" if asleep else self._draft.load()
        finally:
            gc.enable()
        self._asleep = asleep
        self._status = self._draft.table.draft[0]
        return line

    def serve(self) -> NoReturn:
        """Draft until the process is killed."""
        import torch

        self._status["pid"] = os.getpid()
        self._status["joined"], self._status["away"] = 0, ASLEEP if self._asleep else 0
        if not self._asleep:
            self._draft.served.beat()
        self._control = Sockets()
        self._control.serve(
            self._run_dir,
            {Wake: self._wake, Reload: self._reload, Join: self._join, Leave: self._leave},
        )
        with torch.inference_mode():
            self._loop()

    def _loop(self) -> NoReturn:
        next_owner_check = 0.0
        last_work = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_owner_check:
                next_owner_check = now + OWNER_CHECK_S
                rundir.touch(self._run_dir)
                if self._draft.engine is not None:
                    self._tend(self._draft.engine)
            if self._asleep:
                self._control.wait(REST_S)
            self._control.drain()
            engine = self._draft.engine
            if engine is None:
                if not self._asleep:
                    self._come_back()
                continue
            for served in engine.tables:
                served.beat()
            if engine.step():
                last_work = now
            elif not len(engine.requests):
                self._control.wait(REST_S)
            else:
                idle_s = now - last_work
                longest_s = 0.0 if self._draft.on_gpu and idle_s < 1 else LONG_PAUSE_S
                time.sleep(min(max(PAUSE_S, idle_s * PAUSE_SHARE), longest_s))

    def _tend(self, engine: DraftEngine) -> None:
        """Once a second, ask for requests that the draft does not know. Part with engines that are
        gone or have moved to another draft."""
        for run_dir, joined in list(self._joined.items()):
            if not joined.lives():
                logger.info("SSD: the engine in %s is gone", run_dir)
                self._part(run_dir)
                rundir.remove(Path(run_dir))
            elif not joined.served.is_ours:
                self._part(run_dir)
        for served in engine.tables:
            served.ask_for_unknown()
        self._status["live"] = len(engine.requests)

    def _come_back(self) -> None:
        """Load the draft again. The engines that it parted with join again by themselves."""
        line = self._draft.load()
        self._draft.served.beat()
        self._status["away"] = 0
        logger.info("SSD: draft ready (%s)", line)

    def _wake(self, message: Wake) -> str:
        if self._asleep:
            self._asleep, self._status["away"] = False, RELOADING
        return ""

    def _go_away(self, why: int) -> None:
        """Stop drafting on purpose, for the reason ``why``. A heartbeat of 0 lets targets skip
        waiting. The keeper accepts it without limit while the draft sleeps, and otherwise counts
        the draft as lost after ``start_timeout_s`` seconds."""
        self._status["away"] = why
        self._status["heartbeat"] = 0
        for run_dir in list(self._joined):
            self._part(run_dir)

    def _reload(self, message: Reload) -> str:
        self._go_away(ASLEEP if self._asleep else RELOADING)
        problem = ""
        try:
            self._draft.take_weights(message.path)
        except ValueError as error:
            problem = str(error)
        if problem or self._asleep:
            self._draft.put_away()  # frees the weights just read; a failure's traceback held them
        return problem

    # An engine that the server has parted with sees no heartbeat and sends ``Join`` again.

    def _join(self, message: Join) -> str:
        from vllm_ssd.service.served_engine import ServedEngine

        if self._draft.engine is None:
            return NOT_LOADED
        self._part(message.run_dir)
        if message.engines not in (None, len(self._joined)):
            return OTHERS_CAME
        try:
            joined = ServedEngine(Path(message.run_dir), self._draft.engine, self._control)
        except (OSError, ValueError) as error:
            return str(error)
        self._joined[message.run_dir] = joined
        self._tell_number()
        return ""

    def _leave(self, message: Leave) -> str:
        self._part(message.run_dir)
        if message.asleep and not self._joined:
            self._asleep = True
            self._go_away(ASLEEP)
            self._draft.put_away()
        return ""

    def _part(self, run_dir: str) -> None:
        joined = self._joined.pop(run_dir, None)
        if joined is not None:
            joined.leave()
            self._tell_number()

    def _tell_number(self) -> None:
        assert self._draft.engine is not None
        for served in self._draft.engine.tables:
            served.tell("joined", len(self._joined))
