"""The keeper: the process that owns the draft's Ray, and restarts a draft that was lost.

The engine core starts it and talks to it over one socket pair. Ray lives here and not in the
engine core because Ray brings threads (after which forking workers is unsafe), signal handlers and
exit hooks; and because the keeper sees the engine core die, however it dies, by the end of the
socket, and puts everything away.

Lines of JSON to the engine core: ``{"ready": text}`` or ``{"failed": text}``, once; later
``{"lost": text}``, then ``{"not_back": text}`` for every failed restart, and ``{"back": text}``, or
``{"given_up": text}`` at the end of it; ``{"stays": text}`` now and then, as long as the process of
a lost draft does not end; and ``{"awaited": text}``, what a start waits for now.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from vllm_ssd.lifecycle import own_ray
from vllm_ssd.lifecycle.actor import POLL_S, DraftActor, DraftLost, RayLost, sentence
from vllm_ssd.lifecycle.own_table import engines_of
from vllm_ssd.lifecycle.restarts import Restarts
from vllm_ssd.lifecycle.server_spec import SPEC_FILE, KeeperSpec
from vllm_ssd.protocol import rundir

# How variables begin that are meant for the target. By its place in a data parallel group vLLM
# would have the draft join that group. What the target computes the same in every batch is its own
# text; drafts may differ, and the kernels that do not are slower.
_OF_TARGET = ("VLLM_DP_", "VLLM_BATCH_INVARIANT")
SAY_AGAIN_S = 60.0  # that a killed process is still there: its GPU's driver may never let it end


class OwnerGone(Exception):
    """The engine core has closed the channel."""


class Keeper:
    """Starts the draft server, reports what becomes of it, takes it down. again: the one before was
    killed."""

    def __init__(self, run_dir: Path, channel: socket.socket, again: bool):
        self._run_dir = run_dir
        self._channel = channel
        self._again = again
        self._name = ""  # as long as the draft is to be kept for engines that have it

    def run(self) -> None:
        """Until the engine core closes the channel."""
        try:
            spec = msgspec.json.decode((self._run_dir / SPEC_FILE).read_bytes(), type=KeeperSpec)
            self._name = spec.name
            with contextlib.closing(DraftActor(spec.server, spec.start_timeout_s)) as actor:
                self._keep(actor, spec)
        except OwnerGone:
            pass
        except Exception as error:  # whatever it is, the engine core must hear of it
            self._say("failed", sentence(error))
            raise
        finally:
            rundir.remove(self._run_dir)
            # vLLM kills engines: then this is the last to see their files.
            rundir.sweep()

    def _keep(self, actor: DraftActor, spec: KeeperSpec) -> None:
        """Run one draft server after the other, until ``OwnerGone``."""
        restarts = Restarts(spec.max_restarts)
        first = not self._again
        if self._again:
            actor.take_over()
            self._bury(actor)
        while True:
            served = False
            try:
                self._say("awaited", "the draft's Ray")
                actor.start(again=not first)
                self._say("awaited", "the draft model")
                # The engine core itself limits the duration of the first start.
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
                    self._name = ""  # there is nothing to keep for the others
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
        """Wait for what the server's task returns; ``DraftLost`` after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (text := actor.result()) is None:
            if time.monotonic() >= deadline:
                actor.close()  # with Ray, which may be what hangs
                limit = f"{timeout_s:g} s (start_timeout_s)"
                raise DraftLost(f"the draft model was not ready within {limit}")
            self._rest(POLL_S)
        return text

    def _rest(self, seconds: float | None) -> None:
        """Sleep, None = for ever; ``OwnerGone`` as soon as nobody needs the draft any more."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        # The engine core writes nothing: a readable channel is closed.
        while select.select([self._channel], [], [], seconds)[0]:
            if not (self._name and engines_of(self._name)):
                raise OwnerGone
            # The engine that started the draft has gone before others that share it.
            pause = min(POLL_S, deadline - time.monotonic())
            if pause <= 0:
                return
            time.sleep(pause)

    def _say(self, kind: str, text: str) -> None:
        try:
            self._channel.sendall(json.dumps({kind: text}).encode() + b"\n")
        except BrokenPipeError:
            pass  # the engine core is gone: the next ``_rest`` raises ``OwnerGone``


def main(run_dir: str, channel_fd: str, again: str = "") -> None:
    """``python -m vllm_ssd.lifecycle.keeper RUN_DIR FD [AGAIN]``, as ``launch.py`` starts it."""
    # Nobody's child: vLLM kills a process that is slow to stop together with all its children,
    # and then somebody must be left to put things away.
    if os.fork():
        os._exit(0)
    # Ctrl-C reaches the whole terminal; the engine core decides when the draft ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own_ray.set_environment(Path(run_dir))
    for name in [name for name in os.environ if name.startswith(_OF_TARGET)]:
        del os.environ[name]
    # SIGTERM is an order to put things away too: leave through run's finally.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Keeper(Path(run_dir), socket.socket(fileno=int(channel_fd)), bool(again)).run()


if __name__ == "__main__":
    from vllm_ssd.lifecycle.keeper import main as _main  # so that Ray pickles by the module's name

    _main(*sys.argv[1:])
