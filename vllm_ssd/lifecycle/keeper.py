"""The keeper: the process that owns the draft's Ray and restarts a lost draft.

The engine core starts it and talks to it over one socket pair. The keeper owns Ray because Ray
brings threads, signal handlers and exit hooks, and forking workers is unsafe after threads start.
The socket closes however the engine core dies. The keeper then ends the draft and cleans up.

The keeper sends these kinds of lines to the engine core:
- ``ready`` or ``failed``: once, the result of the first start.
- ``lost``, ``not_back`` for every failed restart, then ``back`` or ``given_up``.
- ``stays``: every ``SAY_AGAIN_S`` seconds while the process of a lost draft does not end.
- ``awaited``: the step that a start waits for now.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from vllm_ssd.lifecycle.actor import POLL_S, DraftActor, DraftLost, RayLost
from vllm_ssd.lifecycle.detached import detach, say
from vllm_ssd.lifecycle.own_ray import OwnRay, UsersRay, sentence, set_environment
from vllm_ssd.lifecycle.own_table import engines_of
from vllm_ssd.lifecycle.restarts import Restarts
from vllm_ssd.lifecycle.server_spec import ServerSpec
from vllm_ssd.protocol import rundir

# Prefixes of variables that are for the target only. With VLLM_DP_* vLLM would make the draft join
# the target's data parallel group. The target's text does not depend on whether drafts are batch
# invariant, and batch invariant kernels are slower.
_OF_TARGET = ("VLLM_DP_", "VLLM_BATCH_INVARIANT")
SAY_AGAIN_S = 60.0  # between reports of a killed process: its GPU driver may never let it end


class OwnerGone(Exception):
    """The engine core has closed the channel."""


class Keeper:
    """Starts the draft server, reports its state, restarts it and takes it down."""

    def __init__(self, spec: ServerSpec, channel: socket.socket, own_ray: OwnRay | UsersRay):
        self._spec = spec
        self._ray = own_ray
        self._channel = channel
        self._name = spec.name  # if set, the draft stays while an engine has it in its table

    def run(self) -> None:
        """Keep the draft until the engine core closes the channel and no engine needs the draft, or
        until SIGTERM. Then the engine core keeps the files for another keeper, unless it ends."""
        try:
            with contextlib.closing(DraftActor(self._spec, self._ray)) as actor:
                self._keep(actor)
        except OwnerGone:
            pass
        except Exception as error:  # the engine core must be told of every error
            self._say("failed", sentence(error))
            raise
        finally:
            if not (sys.exc_info()[0] is SystemExit and self._has_owner()):
                rundir.remove(Path(self._spec.run_dir))
                # vLLM may have killed the engines, and the keeper outlives them to remove their
                # files.
                rundir.sweep()

    def _keep(self, actor: DraftActor) -> None:
        """Run one draft server after the other, until ``OwnerGone``."""
        spec = self._spec
        restarts = Restarts(spec.max_restarts)
        first = not actor.take_over()
        if not first:
            self._bury(actor)
        while True:
            served = False
            try:
                self._say("awaited", "the draft's Ray")
                actor.start(again=not first)
                self._say("awaited", "the draft model")
                # The engine core applies its own timeout to the first start.
                text = self._result(actor, math.inf if first else spec.start_timeout_s)
                actor.serve()
                restarts.served()
                self._say("ready" if first else "back", text)
                first, served = False, True
                raise DraftLost(self._result(actor))
            except DraftLost as error:
                final = first and not isinstance(error, RayLost)  # it would fail again
                pause = None if final else restarts.pause()
                if first and pause is not None:
                    self._say("awaited", f"the draft's Ray, which is started again ({error})")
                else:
                    again = "lost" if served else "not_back"
                    kind = "failed" if first else "given_up" if pause is None else again
                    self._say(kind, str(error))
                actor.kill()
                self._bury(actor)
                if pause is None:
                    actor.give_up()
                    self._name = ""  # no draft is left for the other engines
            self._rest(pause)

    def _bury(self, actor: DraftActor) -> None:
        """Wait until a killed server's process has ended."""
        killed = said = time.monotonic()
        while not actor.gone():
            if time.monotonic() - said >= SAY_AGAIN_S:
                said = time.monotonic()
                self._say("stays", f"{said - killed:.0f} s")
            self._rest(POLL_S)

    def _result(self, actor: DraftActor, timeout_s: float = math.inf) -> str:
        """Wait for the server's task and return its text; ``DraftLost`` after ``timeout_s`` s."""
        deadline = time.monotonic() + timeout_s
        while (text := actor.result()) is None:
            if time.monotonic() >= deadline:
                actor.close()  # also ends Ray, which may be the part that hangs
                limit = f"{timeout_s:g} s (start_timeout_s)"
                raise DraftLost(f"the draft model was not ready within {limit}")
            self._rest(POLL_S)
        return text

    def _rest(self, seconds: float | None) -> None:
        """Sleep for ``seconds``, None = for ever; ``OwnerGone`` once no process needs the draft."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while not self._has_owner(seconds):
            if not (self._name and engines_of(self._name)):
                raise OwnerGone
            # The engine that started the draft is gone, but other engines still share the draft.
            pause = min(POLL_S, deadline - time.monotonic())
            if pause <= 0:
                return
            time.sleep(pause)

    def _has_owner(self, seconds: float | None = 0) -> bool:
        """Wait for ``seconds``, None = for ever, and return whether the engine core still has the
        channel. If not, return at once."""
        # The engine core writes nothing: a readable channel is closed. ``select`` would refuse a
        # channel with a number above 1023, which a parent with many open files gives.
        closed = select.poll()
        closed.register(self._channel, select.POLLIN)
        return not closed.poll(None if seconds is None else seconds * 1000)

    def _say(self, kind: str, text: str) -> None:
        say(self._channel, kind, text)  # if nobody hears it, the next ``_rest`` finds that out


def keep_in_thread(run_dir: Path, spec: ServerSpec, locks: Iterable[int]) -> socket.socket:
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
    set_environment(Path(spec.run_dir))
    for name in [name for name in os.environ if name.startswith(_OF_TARGET)]:
        del os.environ[name]
    # SIGTERM also ends the draft: sys.exit leaves through the ``finally`` of ``run``.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Keeper(spec, channel, OwnRay(Path(spec.run_dir))).run()


if __name__ == "__main__":
    from vllm_ssd.lifecycle.keeper import main as _main  # so that Ray pickles by the module's name

    _main()
