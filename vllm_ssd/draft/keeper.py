"""The keeper: the process that owns the draft's Ray.

The engine core starts it and talks to it over one socket pair. Ray lives here and not in the
engine core because Ray brings threads (after which forking workers is unsafe), signal handlers and
exit hooks; and because the keeper sees the engine core die, however it dies, by the end of the
socket, and puts everything away.

Lines of JSON to the engine core: ``{"ready": text}``, ``{"failed": text}``, ``{"lost": text}``.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from vllm_ssd import rundir
from vllm_ssd.draft.server import DraftServer
from vllm_ssd.draft.spec import ServerSpec
from vllm_ssd.messages import ControlClient, Stop, endpoint

SPEC_FILE = "draft.json"
POLL_S = 0.2
STOP_S = 3.0
OTHER_RAY = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum, nearly; nothing goes through it


class Keeper:
    """Starts the draft server, reports what becomes of it, takes it down."""

    def __init__(self, run_dir: Path, channel: socket.socket):
        self._run_dir = run_dir
        self._channel = channel
        self._server: Any = None

    def run(self) -> None:
        """Until the engine core closes the channel."""
        try:
            import ray

            loading = self._start()
            serving: Any = None
            while not self._owner_gone(POLL_S):
                tasks = [task for task in (loading, serving) if task is not None]
                done, _ = ray.wait(tasks, timeout=0) if tasks else ([], [])
                if not done:
                    continue
                try:
                    text = ray.get(done[0])
                except ray.exceptions.RayError as error:
                    self._say("failed" if loading is not None else "lost", _sentence(error))
                    loading = serving = None
                    continue
                if loading is not None:
                    loading, serving = None, self._server.serve.remote()
                    self._say("ready", text)
                else:
                    self._say("lost", text)
                    serving = None
        except Exception as error:  # whatever it is, the engine core must hear of it
            self._say("failed", _sentence(error))
            raise
        finally:
            self._put_away()

    def _start(self) -> Any:
        import ray

        spec = msgspec.json.decode((self._run_dir / SPEC_FILE).read_bytes(), type=ServerSpec)
        # Inherited by Ray and the server. Ray on ROCm does not even start where the environment has
        # ROCR_VISIBLE_DEVICES without HIP_VISIBLE_DEVICES.
        os.environ.update(spec.environment)
        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(self._run_dir / "ray"),
            _node_ip_address="127.0.0.1",
            logging_level=logging.WARNING,
        )
        actor = ray.remote(DraftServer).options(num_cpus=0, num_gpus=0, max_restarts=0)
        self._server = actor.remote(spec)
        return self._server.load.remote()

    def _owner_gone(self, wait_s: float) -> bool:
        """The engine core only ever closes the channel; wait that long for it."""
        readable, _, _ = select.select([self._channel], [], [], wait_s)
        return bool(readable)

    def _say(self, kind: str, text: str) -> None:
        try:
            self._channel.sendall(json.dumps({kind: text}).encode() + b"\n")
        except BrokenPipeError:
            pass  # nobody is left to hear it; the loop ends at the next look

    def _put_away(self) -> None:
        """Ask the server to stop, make sure that it has, and remove every file."""
        import ray

        if self._server is not None and ray.is_initialized():
            control = ControlClient(endpoint(self._run_dir))
            control.send(Stop())
            ray.wait([self._server.__ray_ready__.remote()], timeout=STOP_S)
            control.close()
            ray.kill(self._server)
        if ray.is_initialized():
            ray.shutdown()
        rundir.remove(self._run_dir)


def _sentence(error: Exception) -> str:
    """The draft's own words out of an error that Ray wrapped in a traceback."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def main(run_dir: str, channel_fd: str) -> None:
    """``python -m vllm_ssd.draft.keeper RUN_DIR FD``; started by ``target/launch.py`` only."""
    # Nobody's child: vLLM kills a process that is slow to stop together with all its children,
    # and then somebody must be left to put things away.
    if os.fork():
        os._exit(0)
    # Ctrl-C reaches the whole terminal; the engine core decides when the draft ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The target may be a job of another Ray. The draft's is its own and on this machine, where the
    # speculation table is: it must neither join that cluster nor repeat the job's setup.
    for name in OTHER_RAY:
        os.environ.pop(name, None)
    # SIGTERM is an order to put things away too: leave through run's finally.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Keeper(Path(run_dir), socket.socket(fileno=int(channel_fd))).run()


if __name__ == "__main__":
    from vllm_ssd.draft.keeper import main as _main  # so that Ray pickles by the module's name

    _main(*sys.argv[1:])
