"""Starts a draft of a draft service through a keeper process, waits for it, and stops it; counts
restarts."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.log import get_logger
from vllm_ssd.service.detached import start_detached, words
from vllm_ssd.service.own_table import FREE_FOLDER, OwnFiles, in_a_sentence, table_shape
from vllm_ssd.service.placement import DraftDevice
from vllm_ssd.service.server_spec import ServerSpec, make_server_spec
from vllm_ssd.table import FOR_GOOD, TableOwner, is_own_draft
from vllm_ssd.table.draft_names import DraftName, publish

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

_GIVEN_UP = (
    "SSD: the draft is lost (%s) and is not started again (max_restarts is %d); serving goes on "
    "without drafts: see above what it dies of, and start the engine anew to have drafts"
)
# Seconds after ``begin_stop`` that ``stop`` waits for the keeper. vLLM kills an engine core after
# 5 s, and the engine core's own exit takes a part of these.
STOP_S = 3.0
PAUSE_S = 0.5  # to wait before a restart, which itself takes seconds
FORGIVEN_S = 60.0  # of service, after which restarts count anew
SAY_S = 30.0  # between two log lines that the draft is still awaited
_LOOK_S = 0.05  # between two looks whether it is there


Keep = Callable[[ServerSpec, Iterable[int]], socket.socket]


def keep_in_process(spec: ServerSpec, locks: Iterable[int]) -> socket.socket:
    """Start a keeper in a process of its own, without importing it here: it imports much."""
    return start_detached("vllm_ssd.service.keeper", Path(spec.run_dir), spec, locks)[0]


class DraftLauncher:
    """Runs one draft of a draft service on one device. Call ``start``, then ``wait_ready``. Call
    ``stop`` at any time, any number of times. The keeper ends with this process, even if that is
    killed. If engines started the service, the keeper ends with the last engine that has its name.

    The config is an engine's. For ``vllm-ssd draft`` its target is the draft itself. The table has
    no requests: the keeper and other processes read the draft's state from it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        named: DraftName,
        device: DraftDevice,
        keep: Keep = keep_in_process,
    ):
        """keep: starts the keeper."""
        self._keep = keep
        self._vllm_config = vllm_config
        self._config: Any = vllm_config.speculative_config
        self._named = named
        self._device = device
        self._channel: socket.socket | None = None
        self._listener: threading.Thread | None = None
        self._files: OwnFiles | None = None
        self._keepers = Restarts(self._config.max_restarts)  # restarts of killed keepers
        self._ending = threading.RLock()  # held while a keeper is restarted or told to end
        self._stopping = False
        self._stop_begun = 0.0
        self._awaited = "the keeper"  # the step that the draft's start waits for
        self._ready = False
        self._begun = 0.0
        self.failure = ""  # why the draft could not be started, as a sentence
        # There is no draft and none will be started. Set last: readers then know why.
        self.given_up = False

    def start(self) -> None:
        """Make the table and start the draft server; returns before the draft is loaded. Raises
        ``NoRoom``, and ``ValueError`` with a sentence if another service has the name; call
        ``stop`` then, too."""
        from vllm.platforms import current_platform

        shape = replace(table_shape(self._vllm_config), slots=1)
        owner = TableOwner(pid=os.getpid(), draft_server=self._named.name)
        self._files = OwnFiles(shape, owner)
        self.run_dir = self._files.run_dir
        with in_a_sentence("no room for the draft's description", FREE_FOLDER):
            publish(self.run_dir, self._named)
        self._spec = make_server_spec(
            self._vllm_config,
            str(self.run_dir),
            self._device,
            current_platform,
            self._named.name if is_own_draft(self._named.name) else "",
        )
        draft, policy = self._spec.model.engine_args["model"], self._spec.policy
        logger.info(
            "SSD: starting draft %s on %s (k=%d, f=%d)", draft, self._device, policy.k, policy.f
        )
        self._begun = time.monotonic()
        with in_a_sentence("the draft's keeper cannot be started", "see 'ulimit -a'"):
            self._start_keeper()
        self._listener = threading.Thread(target=self._listen, name="ssd-keeper", daemon=True)
        self._listener.start()

    def _start_keeper(self) -> socket.socket:
        assert self._files is not None
        # The listener reports a keeper that fails.
        self._channel = self._keep(self._spec, self._files.locks)
        return self._channel

    def wait_ready(self) -> None:
        """Wait until the draft is loaded; ``RuntimeError`` with a sentence if that fails. The
        caller then calls ``stop``."""
        timeout_s, loading = self._config.start_timeout_s, "loading the draft"
        if not wait_for(lambda: self._ready or bool(self.failure), timeout_s, self._begun, loading):
            self.failure = self.failure or self.late()
        if self.failure:
            raise RuntimeError(f"SSD: the draft could not be started: {self.failure}")

    def late(self) -> str:
        """Says that the draft is not ready in time, and what its start waits for."""
        limit = f"{self._config.start_timeout_s:g} s (start_timeout_s)"
        return f"{self._awaited} was not ready within {limit}"

    def expect_end(self) -> None:
        """Miss neither draft nor keeper from now on. Takes no lock: signal handlers call this."""
        self._stopping = True

    def begin_stop(self) -> None:
        """Tell the keeper to take the draft down, without waiting for it."""
        with self._ending:
            self.expect_end()
            self._stop_begun = self._stop_begun or time.monotonic()
            if self._channel is not None:
                with contextlib.suppress(OSError):  # the keeper may have ended before
                    self._channel.shutdown(socket.SHUT_WR)

    def stop(self, within_s: float = STOP_S, *, leave: bool = False) -> None:
        """Take the draft down. Returns when the keeper has ended, at the latest ``within_s``
        seconds after ``begin_stop``. A keeper that takes longer removes the files when it ends.
        leave: the draft goes on for the other engines that have its name, and ends with the last
        of them."""
        self.begin_stop()
        keeper_at_work = leave
        if self._channel is not None and self._listener is not None:
            if leave:
                with contextlib.suppress(OSError):  # the keeper may have ended before
                    self._channel.shutdown(socket.SHUT_RD)  # ends the listener
            join(self._listener, max(0.0, self._stop_begun + within_s - time.monotonic()))
            keeper_at_work |= self._listener.is_alive()
        self._channel = self._listener = None
        if self._files is not None and keeper_at_work:
            self._files.let_go()
        elif self._files is not None:
            self._files.remove()

    def _listen(self) -> None:
        """Handle the keeper's messages until it ends; restart a keeper that was killed."""
        channel = self._channel
        while channel is not None:
            for kind, text in words(channel):
                self._hear(kind, text)
            channel = None if self._stopping else self._start_again()
        if not self._ready:
            self.failure = self.failure or "its keeper process ended; see the log above"
        self.given_up = True

    def _start_again(self) -> socket.socket | None:
        """Start another keeper in place of one that is gone, unless that ended by itself: then it
        has removed the run directory. Returns the channel to it, None if none is to be started."""
        killed = self._ready and not self.given_up and self.run_dir.exists()
        if not (killed and self._keepers.again()):
            logger.error("SSD: the draft's keeper is gone; serving goes on without drafts")
            assert self._files is not None
            status = self._files.table.draft[0]  # which a killed keeper does not write
            status["heartbeat"], status["away"] = 0, FOR_GOOD
            return None
        what = "serving goes on without drafts while both are started again"
        logger.error("SSD: the draft's keeper is gone, and the draft with it; %s", what)
        time.sleep(PAUSE_S)
        with self._ending:
            try:
                return None if self._stopping else self._start_keeper()
            except OSError as error:  # too many open files, no memory
                logger.error("SSD: the draft's keeper could not be started again: %s", error)
                return self._channel  # which is closed: another try follows

    def _hear(self, kind: str, text: str) -> None:
        """Handle a message of the keeper, which describes its kinds."""
        if kind == "awaited":
            self._awaited = text
            logger.debug("SSD: waiting for %s", text)
        elif kind == "ready":
            if not self._ready:
                logger.info("SSD: draft ready (%s)", text)
            elif not self._stopping:
                logger.warning("SSD: the draft is back: %s", text)
            self._ready = True
            self._keepers.served()
        elif kind == "failed":
            if not self._ready:
                self.failure = text
            elif not self._stopping:
                logger.error(_GIVEN_UP, text, self._config.max_restarts)
            self.given_up = True
        elif not self._stopping:
            logger.error("SSD: the draft %s", text)


class Restarts:
    """Decides whether what was lost is started again. most: consecutive restarts allowed; after
    ``FORGIVEN_S`` seconds of service they count anew."""

    def __init__(self, most: int):
        self._most = self._left = most
        self._served_from = math.inf

    def served(self) -> None:
        """Record that the draft serves from now on."""
        self._served_from = time.monotonic()

    def again(self) -> bool:
        """Record a loss and return whether a restart follows."""
        if time.monotonic() - self._served_from >= FORGIVEN_S:
            self._left = self._most
        self._served_from = math.inf
        self._left -= 1
        return self._left >= 0


def wait_for(done: Callable[[], bool], timeout_s: float, begun: float, what: str) -> bool:
    """Wait until ``done()``, at most ``timeout_s`` seconds; returns whether it is. Logs every
    ``SAY_S`` seconds what takes so long. begun: when it began, in monotonic seconds."""
    now = time.monotonic()
    deadline, say = now + timeout_s, now + SAY_S
    while not done():
        now = time.monotonic()
        if now >= deadline:
            return False
        if now >= say:
            say = now + SAY_S
            logger.info("SSD: still %s (%.0f s)", what, now - begun)
        time.sleep(_LOOK_S)
    return True


def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Wait for a thread's end. Does nothing in the thread itself: Python may collect a dropped
    executor there, and that ends the draft."""
    if thread is not threading.current_thread():
        thread.join(timeout_s)
