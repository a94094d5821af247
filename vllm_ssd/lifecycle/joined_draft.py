"""The engine core's side of the draft: joins a draft service, watches it, sleeps, leaves it.

When the draft is lost, this module clears the heartbeat in the engine's table, so that the target
skips waiting. It then tries to join a draft again.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from vllm_ssd.lifecycle.found_draft import FoundDraft
from vllm_ssd.lifecycle.launch import await_word, join
from vllm_ssd.lifecycle.own_table import OwnFiles, draft_name, table_owner, table_shape
from vllm_ssd.lifecycle.ray_placement import place_target_by_ray
from vllm_ssd.log import get_logger
from vllm_ssd.protocol import rundir
from vllm_ssd.protocol.draft_names import find_all
from vllm_ssd.protocol.messages import NOT_NOW, OTHERS_CAME, Join, Leave, Wake, ask
from vllm_ssd.protocol.service_state import State

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

TEND_S = 0.2  # between two checks of the draft
JOIN_S = 1.0  # between two tries to join it
ANSWER_S = 3.0  # timeout of its answer, which takes milliseconds unless it hangs
LOST_S = 0.2  # and of the answer of a lost draft, which takes milliseconds or does not come
PUT_AWAY_S = 60.0  # timeout of the answer of a draft that frees its memory, which takes seconds
SPREAD_S = 5.0  # between two checks whether the engines are spread evenly over several drafts


class JoinedDraft:
    """Joins a draft service by its name; one object per engine core. ``OwnDraft`` first starts a
    service, ``RemoteDraft`` a relay to one on another node. Call ``start`` before the target's
    workers, ``workers_started`` and ``wait_ready`` after them, ``stop`` at any time, repeatedly."""

    def __init__(self, vllm_config: VllmConfig):
        self._vllm_config = vllm_config
        self._config: Any = vllm_config.speculative_config
        self._name = draft_name(vllm_config)
        self._process = os.getpid()
        self._files: OwnFiles | None = None
        self._draft: FoundDraft | None = None  # None: no draft drafts for this engine now
        self._turn = threading.Lock()  # held by the thread, ``sleep`` and ``wake`` while they work
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._asleep = False
        self._next_try = 0.0
        self._due = math.inf  # time at which a draft that is away on purpose must be back
        self._failure = ""  # the last exception that the thread has logged since it joined
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()  # result of the first try
        self._tried = self._started = self._lost = False
        self._speaks = True  # logs losses and returns; False: the launcher logs them
        self._engine_ends = False

    @property
    def about(self) -> str:
        """Name of the draft for messages."""
        return f"the draft server {self._name!r}"

    def start(self) -> None:
        """Make the table and, if the service is ready, ask it to draft on that. Raises
        ``RuntimeError`` if it refuses and drafts are required."""
        if self._vllm_config.parallel_config.use_ray:
            place_target_by_ray(self._vllm_config.parallel_config)
        self._files = OwnFiles(table_shape(self._vllm_config), table_owner(self._vllm_config))
        self._run_dir = self._files.run_dir
        self._config.run_dir = str(self._run_dir)
        self._table = self._files.table
        self._begun = time.monotonic()
        if self._config.draft_server is not None:
            logger.info("SSD: joining %s", self.about)
        self._try_to_join()
        if not self._words.empty():
            self.wait_ready()

    def workers_started(self) -> None:
        """Start the watching thread. No worker is forked after this call, so threads are safe."""
        self._thread = threading.Thread(target=self._watch, name="ssd-draft-server", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until the service drafts for this engine. Raises ``RuntimeError`` with a sentence if
        that fails and drafts are required."""
        if self._started:
            return
        timeout_s = self._config.start_timeout_s
        try:
            what = f"joining {self.about}"
            refusal = await_word(self._words, timeout_s, self._begun, what)
        except queue.Empty:
            self._tried = True  # no caller waits for the result now: ``_say`` logs it
            refusal = f"it was not ready within {timeout_s:g} s (start_timeout_s)"
        if not refusal:
            if self._config.draft_server is not None:
                k, f = self._config.k, self._config.f
                logger.info("SSD: %s drafts for this engine (k=%d, f=%d)", self.about, k, f)
        elif self._config.required:
            self.stop()
            raise RuntimeError(f"SSD: {self.about} could not be joined: {refusal}")
        else:
            instead = "serving begins without drafts, as required is false"
            logger.error("SSD: %s could not be joined: %s; %s", self.about, refusal, instead)
            self._lost = True
        self._started = True

    def sleep(self) -> None:
        """Leave the service while this engine sleeps. A service without other engines frees its
        memory; returns when it has done so."""
        with self._turn:
            self._asleep, self._due = True, math.inf
            self._leave(PUT_AWAY_S, asleep=True)

    def wake(self) -> None:
        """Let the thread join the service again. The target serves without drafts until then."""
        with self._turn:
            self._asleep = False
            self._next_try = 0.0
            self._due = time.monotonic() + self._config.start_timeout_s

    def expect_end(self) -> None:
        """Miss no draft from now on: vLLM is told to end. Takes no lock: a signal handler calls
        this."""
        self._engine_ends = True

    def begin_stop(self) -> None:
        """Stop the draft before vLLM stops the target's workers: vLLM kills an engine core that
        takes too long afterwards. The workers keep the files that they need open."""
        if os.getpid() == self._process:
            self._begin_stop()

    def stop(self) -> None:
        """Leave the service and remove this engine's files. Does nothing in a forked child, which
        ends while the engine goes on."""
        if os.getpid() == self._process:
            self._stop()

    def _begin_stop(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._end_watch()
        self._leave()
        if self._files is not None:
            self._files.remove()

    def _end_watch(self) -> None:
        self._ended.set()
        if self._thread is not None:
            join(self._thread)

    def _watch(self) -> None:
        next_spread = time.monotonic() + SPREAD_S
        while not self._ended.wait(TEND_S):
            with self._turn:
                try:
                    self._tend()
                    if time.monotonic() >= next_spread and not self._engine_ends:
                        next_spread = time.monotonic() + SPREAD_S
                        self._spread()
                    rundir.touch(self._run_dir)
                except Exception as error:  # too many open files, for example
                    self._survive(error)

    def _tend(self) -> None:
        """Check the draft that this engine has joined. If there is none, try to join one."""
        if self._draft is not None:
            self._check(self._draft)
        elif not (self._asleep or self._engine_ends) and time.monotonic() >= self._next_try:
            self._try_to_join()
            if self._draft is None and time.monotonic() >= self._due:
                self._lose(f"not back within {self._config.start_timeout_s:g} s")

    def _survive(self, error: Exception) -> None:
        """Log each exception of the thread once until the engine has drafts again, and delay the
        next try to join by ``JOIN_S`` seconds."""
        self._next_try = time.monotonic() + JOIN_S
        failure = f"{type(error).__name__}: {error}"
        if failure != self._failure:
            self._failure = failure
            what = "cannot be looked after, and that is tried again"
            logger.error("SSD: %s %s (%s)", self.about, what, failure)

    def _lose(self, why: str) -> None:
        self._due = math.inf
        self._lost = True
        if self._speaks and not self._engine_ends:
            what = "serving goes on without drafts until it is back"
            logger.error("SSD: %s is lost (%s); %s", self.about, why, what)

    def _check(self, draft: FoundDraft) -> None:
        """Check that the draft still drafts for this engine, and part with it if it does not."""
        state = draft.state
        why = state.value if state is not State.SERVING else ""
        if not why and int(self._table.draft["pid"][0]) != draft.pid:
            why = "its draft was started again"
        if not why and not self._table.draft["heartbeat"][0]:
            why = "it does not draft for this engine any more"
        if not why:
            return
        # Another draft may draft for this engine next: a relay to the lost one must then not write.
        self._leave(LOST_S)
        self._next_try = 0.0  # another draft may have this name
        if state in (State.ASLEEP, State.LOADING):  # the draft is away on purpose, for a moment
            self._due = time.monotonic() + self._config.start_timeout_s
        else:
            self._lose(why)

    def _try_to_join(self) -> None:
        self._next_try = time.monotonic() + JOIN_S
        try:
            drafts = self._drafts()
        except ValueError as error:
            self._say(str(error))
            return
        states = [draft.state for draft in drafts]
        ready = [draft for draft, state in zip(drafts, states) if state is State.SERVING]
        if ready:
            self._join(min(ready, key=lambda draft: draft.engines))
        elif drafts and all(state is State.GONE for state in states):
            self._say("its draft is lost for good, and its log says of what")
        else:  # no draft is ready; wake those that sleep
            for draft, state in zip(drafts, states):
                if state is State.ASLEEP:
                    ask(draft.run_dir, Wake(), ANSWER_S)
        if drafts and self._draft is None:
            self._table.draft["away"] = drafts[0].away  # shown to readers of this table

    def _join(self, draft: FoundDraft) -> None:
        answer = ask(draft.run_dir, Join(str(self._run_dir), draft.engines), ANSWER_S)
        if answer is None or answer in NOT_NOW:
            if answer == OTHERS_CAME:
                self._next_try = 0.0
            return
        if not answer:
            self._draft = draft
            self._table.draft["away"] = 0
            self._due, self._failure = math.inf, ""
        self._say(answer)

    def _drafts(self) -> list[FoundDraft]:
        """All drafts of the service. Raises ``ValueError`` with a sentence if there is none, or one
        has another version of this package."""
        drafts = []
        for run_dir, _ in find_all(self._name):
            with contextlib.suppress(FileNotFoundError):  # the draft is ending
                drafts.append(FoundDraft(run_dir))
        return drafts

    def _spread(self) -> None:
        """Move to another draft of the service if it would have fewer engines than this one."""
        if self._draft is None:
            return
        try:
            drafts = self._drafts()
        except ValueError:
            return  # the service is lost, which the next ``_check`` finds
        fewest = min((one.engines for one in drafts if one.state is State.SERVING), default=0)
        if fewest + 1 < self._draft.engines:
            logger.info("SSD: moving to a draft that has fewer engines")
            self._leave()
            self._try_to_join()

    def _say(self, refusal: str) -> None:
        """Report the result of a try to join, "" = joined. The first result goes to ``wait_ready``.
        Later ones are counted and logged if drafts are back."""
        if not self._tried:
            self._tried = True
            self._words.put(refusal)
        elif self._lost and not refusal:
            self._lost = False
            if self._speaks:
                logger.warning("SSD: %s is back", self.about)
            self._table.draft["restarts"] += 1

    def _leave(self, limit_s: float = ANSWER_S, asleep: bool = False) -> None:
        if self._draft is not None:
            self._table.draft["heartbeat"] = 0  # a lost draft does not clear it
            answer = ask(self._draft.run_dir, Leave(str(self._run_dir), asleep), limit_s)
            if asleep and answer is None:
                logger.error("SSD: the draft did not go to sleep within %g s", limit_s)
            self._part()

    def _part(self) -> None:
        """Part with the draft and clear the heartbeat, so that the target skips waiting."""
        self._draft = None
        self._table.draft["heartbeat"] = 0
