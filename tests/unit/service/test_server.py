"""The draft server's loop, around an engine that does nothing."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support.loaded_draft import tiny_spec
from tests.unit.service.fake_service import until
from vllm_ssd.service import server
from vllm_ssd.service.own_ray import has_ended
from vllm_ssd.service.server import DraftServer
from vllm_ssd.table import RELOADING, SpeculationTable, rundir
from vllm_ssd.table.messages import Reload
from vllm_ssd.table.sockets import Sockets


class Enough(Exception):
    """Ends a server's loop."""


@pytest.fixture
def make():
    """A server of this run directory whose loop ends with its first step."""
    made: list[DraftServer] = []

    def make(run_dir: Path) -> DraftServer:
        one = DraftServer(tiny_spec(run_dir, "sdpa", run_dir))
        made.append(one)

        def step() -> bool:
            raise Enough

        served = SimpleNamespace(ask_for_unknown=lambda: None, beat=lambda: None)
        engine = SimpleNamespace(step=step, tables=[served], requests=[])
        one._draft = SimpleNamespace(engine=engine, served=served)
        one._status = {}
        one._control = Sockets()
        one._control.serve(run_dir, {})
        return one

    yield make
    for one in made:
        one._control.close()


def test_its_files_do_not_look_old(make, make_run_dir):
    """A cleaner may have removed the lock file already."""
    run_dir, _ = make_run_dir()
    (run_dir / "lock").unlink()
    os.utime(run_dir, (0, 0))
    with pytest.raises(Enough):
        make(run_dir)._loop()
    assert run_dir.stat().st_mtime > 0


def test_what_vllm_refuses_reaches_the_keeper(models, tmp_path, monkeypatch):
    """Ray sends errors as ``pickle`` does, which does not take those of pydantic."""
    monkeypatch.setattr(server, "hush_vllm", lambda: None)  # other tests wait for its lines
    spec = tiny_spec(models.draft, "sdpa", tmp_path)
    spec.model.engine_args.update(max_num_batched_tokens=8, max_num_seqs=9)
    table = SpeculationTable.create(rundir.new_table_path(tmp_path), spec.policy.table_shape(1))
    with pytest.raises(ValueError) as error:
        DraftServer(spec).load()
    table.path.unlink()
    assert "max_num_batched_tokens (8) must be" in str(pickle.loads(pickle.dumps(error.value)))


RAYLET = """
import os, signal, types
from vllm_ssd.service.server import DraftServer
if os.fork():
    os.wait()
DraftServer(types.SimpleNamespace(run_dir="", cores=[], environment={}))
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_one_that_hangs_ends_with_its_ray():
    """However that ends: its keeper may have been killed, and nobody else knows of it."""
    with subprocess.Popen([sys.executable, "-c", RAYLET], stdout=subprocess.PIPE) as raylet:
        server = psutil.Process(int(raylet.stdout.readline()))
        until(lambda: server.status() == psutil.STATUS_STOPPED)
        raylet.kill()
    until(lambda: has_ended(server))


def test_one_that_takes_other_weights_says_so(make, make_run_dir):
    """It is not asleep: the keeper and its engines miss it if it does not come back."""
    run_dir, _ = make_run_dir()
    one = make(run_dir)
    seen = []
    one._draft.take_weights = lambda path: seen.append((path, dict(one._status)))
    assert one._reload(Reload("folder")) == ""
    assert seen == [("folder", {"away": RELOADING, "heartbeat": 0})]
