"""The engine core's side of the draft: joins a draft service, watches it, sleeps, leaves it.

When the draft is lost, this module clears the heartbeat in the engine's table, so that the target
skips waiting. It then tries to join a draft again.
"""

from __future__ import annotations

import os
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm_ssd.log import get_logger
from vllm_ssd.service.draft_device import place_target_by_ray
from vllm_ssd.service.launch import join, wait_for
from vllm_ssd.service.own_table import OwnFiles, table_owner, table_shape
from vllm_ssd.service.service import FoundDraft, OtherModel, Service
from vllm_ssd.table import rundir
from vllm_ssd.table.messages import NOT_NOW, OTHERS_CAME, Join, Leave, Wake, ask
from vllm_ssd.table.service_state import State

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

TEND_S = 0.2  # between two checks of the draft
PAUSED_S = 1.0  # between two checks, after which the first ignores an old heartbeat
JOIN_S = 1.0  # between two tries to join it
ANSWER_S = 3.0  # timeout of its answer, which takes milliseconds unless it hangs
LOST_S = 0.2  # and of the answer of a lost draft, which takes milliseconds or does not come
PUT_AWAY_S = 60.0  # timeout of the answer of a draft that frees its memory, which takes seconds


class Phase(Enum):
    """How an engine stands with its draft service. In all phases but JOINED and ASLEEP it tries to
    join.

    STARTING: no draft has taken or refused it yet. JOINED: a draft drafts for it. AWAY: its draft
    sleeps, wakes up or reads weights, and must be back within ``start_timeout_s``. LOST: it has no
    draft. ASLEEP: the engine sleeps."""

    STARTING, JOINED, AWAY, LOST, ASLEEP = range(5)


class JoinedDraft:
    """Joins a draft service; one object per engine core. Call ``start`` before the target's
    workers, ``workers_started`` and ``wait_ready`` after them, ``stop`` at any time, repeatedly."""

    def __init__(self, vllm_config: VllmConfig, service: Service):
        self._vllm_config = vllm_config
        self._config: Any = vllm_config.speculative_config
        self._service = service
        self._process = os.getpid()
        self._files: OwnFiles | None = None
        self._phase = Phase.STARTING
        self._draft: FoundDraft | None = None  # the one that drafts for this engine, if JOINED
        self._due = 0.0  # time at which a draft that is AWAY must be back
        self._missed = False  # the draft was lost and has not been back since
        self._turn = threading.Lock()  # held while the phase may change
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._next_try = self._looked = 0.0
        self._failure = ""  # what was logged last since it joined
        self._refusal = ""  # why no draft took this engine at its start
        self._started = self._engine_ends = False

    def start(self) -> None:
        """Make the table and, if the service is ready, ask it to draft on that. Raises
        ``RuntimeError`` if it refuses and drafts are required."""
        self._service.start()
        if self._vllm_config.parallel_config.use_ray:
            place_target_by_ray(self._vllm_config.parallel_config)
        self._files = OwnFiles(table_shape(self._vllm_config), table_owner(self._vllm_config))
        self._run_dir = self._files.run_dir
        self._config.run_dir = str(self._run_dir)
        self._table = self._files.table
        self._begun = time.monotonic()
        if self._config.draft_server is not None:
            logger.info("SSD: joining %s", self._service.about)
        self._tend()
        if self._service.comes_first or self._phase is not Phase.STARTING:
            self.wait_ready()

    def workers_started(self) -> None:
        """Start the watching thread. No worker is forked after this call, so threads are safe."""
        self._service.workers_started()
        self._tend()
        if self._phase is not Phase.STARTING:
            self.wait_ready()
        self._thread = threading.Thread(target=self._watch, name="ssd-draft-server", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until the service drafts for this engine. Raises ``RuntimeError`` with a sentence if
        that fails and drafts are required."""
        if self._started:
            return
        service, timeout_s = self._service, self._config.start_timeout_s
        about, joining = service.about, f"{service.joining} {service.about}"
        if not wait_for(self._decided, timeout_s, self._begun, joining):
            with self._turn:
                self._refused(service.late())
        self._started = True
        if not self._refusal:
            if self._config.draft_server is not None:
                k, f = self._config.k, self._config.f
                logger.info("SSD: %s drafts for this engine (k=%d, f=%d)", about, k, f)
            return
        problem = f"SSD: {about} could not be {service.joined}: {self._refusal}"
        if self._config.required:
            self.stop()
            raise RuntimeError(problem)
        logger.error("%s; serving begins without drafts, as required is false", problem)

    def _decided(self) -> bool:
        if self._thread is None:
            self._tend()
        return self._phase is not Phase.STARTING

    def sleep(self) -> None:
        """Leave the service while this engine sleeps. A service without other engines frees its
        memory; returns when it has done so."""
        with self._turn:
            self._leave(PUT_AWAY_S, asleep=True)
            self._become(Phase.ASLEEP)
        self._service.sleep(self._run_dir)

    def wake(self) -> None:
        """Let the thread join the service again. The target serves without drafts until then."""
        with self._turn:
            if self._phase is Phase.ASLEEP:
                self._become(Phase.AWAY)

    def expect_end(self) -> None:
        """Miss no draft from now on: vLLM is told to end. Takes no lock: a signal handler calls
        this."""
        self._engine_ends = True
        self._service.expect_end()

    def begin_stop(self) -> None:
        """Stop the draft before vLLM stops the target's workers: vLLM kills an engine core that
        takes too long afterwards. The workers keep the files that they need open."""
        if os.getpid() != self._process:
            return
        self._ended.set()
        if self._thread is not None:
            join(self._thread, ANSWER_S)  # a bridge that starts takes longer
        if not self._service.ends_with_engine:  # else it ends anyway, and may hang
            self._leave()
        if self._files is not None:
            self._table.draft["heartbeat"] = 0
            self._files.remove()
        self._service.begin_stop()

    def stop(self) -> None:
        """Leave the service and remove this engine's files. Does nothing in a forked child, which
        ends while the engine goes on."""
        self.begin_stop()
        if os.getpid() == self._process:
            self._service.stop()

    def _become(self, phase: Phase, why: str = "") -> None:
        """Change the phase. Logs a loss, and the return after it. why: of a loss."""
        starting = self._phase is Phase.STARTING
        speaks = not (starting or self._service.logs_losses or self._engine_ends)
        self._next_try = 0.0  # another draft may have the name
        if phase is not Phase.JOINED:
            self._draft = None
            self._table.draft["heartbeat"] = 0  # so that the target skips waiting
        if starting:
            self._refusal = why
        if phase is Phase.AWAY:
            self._due = time.monotonic() + self._config.start_timeout_s
        elif phase is Phase.LOST:
            self._missed = True
            if speaks:
                what = "serving goes on without drafts until it is back"
                logger.error("SSD: %s is lost (%s); %s", self._service.about, why, what)
        elif phase is Phase.JOINED:
            self._failure = ""
            self._table.draft["away"] = 0
            if self._missed:
                self._missed = False
                if speaks:
                    logger.warning("SSD: %s is back", self._service.about)
                self._table.draft["restarts"] += not self._refusal
            self._refusal = ""
        self._phase = phase  # last, for ``wait_ready`` in another thread

    def _watch(self) -> None:
        while not self._ended.wait(TEND_S):
            with self._turn:
                try:
                    self._tend()
                    rundir.touch(self._run_dir)
                except Exception as error:  # too many open files, for example
                    self._survive(error)

    def _tend(self) -> None:
        """Check the draft that this engine has joined. If there is none, try to join one."""
        if self._draft is not None:
            self._check(self._draft)
        elif self._phase is not Phase.ASLEEP and not self._engine_ends:
            if time.monotonic() >= self._next_try:
                self._try_to_join()
            if self._phase is Phase.AWAY and time.monotonic() >= self._due:
                self._become(Phase.LOST, f"not back within {self._config.start_timeout_s:g} s")

    def _survive(self, error: Exception) -> None:
        """Log an exception of the thread, and delay the next try to join by ``JOIN_S`` seconds."""
        self._next_try = time.monotonic() + JOIN_S
        what = "cannot be checked, and ssd tries again"
        self._say_once(f"{what} ({type(error).__name__}: {error})")

    def _say_once(self, failure: str) -> None:
        """Log what goes wrong with the draft once, until the engine has drafts again."""
        if failure != self._failure:
            self._failure = failure
            logger.error("SSD: %s %s", self._service.about, failure)

    def _check(self, draft: FoundDraft) -> None:
        """Check that the draft still drafts for this engine, and part with it if it does not."""
        state, looked, self._looked = draft.state, self._looked, time.monotonic()
        if state is State.LOST and draft.value("heartbeat") and self._looked > looked + PAUSED_S:
            return  # the machine may have stood still: the next check decides
        why = state.value if state is not State.SERVING else ""
        if not why and int(self._table.draft["pid"][0]) != draft.value("pid"):
            why = "its draft was started again"
        if not why and not self._table.draft["heartbeat"][0]:
            why = "it does not draft for this engine any more"
        if why:
            # Another draft may draft for this engine next: no bridge to this one must write then.
            self._leave(LOST_S)
            on_purpose = state in (State.ASLEEP, State.LOADING)
            self._become(Phase.AWAY if on_purpose else Phase.LOST, why)

    def _try_to_join(self) -> None:
        starting = self._phase is Phase.STARTING
        self._next_try = time.monotonic() + (TEND_S if starting else JOIN_S)
        try:
            drafts = self._service.drafts(self._run_dir)
        except ValueError as error:
            self._refused(str(error), is_news=isinstance(error, OtherModel))
            return
        states = [draft.state for draft in drafts]
        ready = [draft for draft, state in zip(drafts, states) if state is State.SERVING]
        if ready:
            self._join(min(ready, key=lambda draft: draft.value("joined")))
        elif drafts and all(state is State.GONE for state in states):
            self._refused("its draft is lost for good, and its log says of what")
        else:  # no draft is ready; wake those that sleep
            for draft, state in zip(drafts, states):
                if state is State.ASLEEP:
                    ask(draft.run_dir, Wake(), ANSWER_S)
        if drafts and self._draft is None:
            self._table.draft["away"] = drafts[0].value("away")  # shown to readers of this table

    def _join(self, draft: FoundDraft) -> None:
        """Ask a draft to draft for this engine. Of engines that ask the same draft at the same
        time, one gets it, and the others look again for the draft with the fewest engines."""
        answer = ask(draft.run_dir, Join(str(self._run_dir), draft.value("joined")), ANSWER_S)
        if answer == OTHERS_CAME:
            self._next_try = 0.0
        elif answer == "":
            self._draft = draft
            self._become(Phase.JOINED)
        elif answer is not None and answer not in NOT_NOW:
            self._refused(answer, is_news=True)

    def _refused(self, why: str, is_news: bool = False) -> None:
        """The first refusal ends STARTING. Later ones are logged only with ``is_news``, once for
        each reason."""
        if self._phase is Phase.STARTING:
            self._become(Phase.LOST, why)
            self._next_try = time.monotonic() + JOIN_S
        elif is_news and why != self._refusal:
            self._say_once(f"does not take this engine: {why}")

    def _leave(self, limit_s: float = ANSWER_S, asleep: bool = False) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            self._table.draft["heartbeat"] = 0  # a lost draft does not clear it
            leave = Leave(str(self._run_dir), asleep)
            answer = ask(draft.run_dir, leave, limit_s, lambda: asleep and draft.is_lost)
            if asleep and answer is None and not draft.is_lost:
                logger.error("SSD: the draft did not go to sleep within %g s", limit_s)
