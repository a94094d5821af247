"""When the keeper takes a draft server for lost, and which it ends, without Ray."""

import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from ray import exceptions

from tests.support.loaded_draft import tiny_spec
from tests.unit.service.fake_service import until
from vllm_ssd.service.keeper import HANG_S, POLL_S, Keeper
from vllm_ssd.service.own_ray import DraftLost, UsersRay
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.table import ASLEEP, RELOADING, TableOwner, TableShape, rundir

TIMEOUT_S = 2.0
LATE = r"was not ready within 2 s \(start_timeout_s\)"
# Heartbeat, why it is away, and for how many seconds; None: until it is lost.
LIVES = [
    ([(0, 0, None)], LATE),
    ([(1, 0, 2 * TIMEOUT_S), (0, RELOADING, None)], LATE),
    ([(0, ASLEEP, 3 * HANG_S), (0, 0, TIMEOUT_S / 2), (1, 0, HANG_S / 2), (1, 0, None)], "no sign"),
]


@pytest.mark.parametrize("life, why", LIVES, ids=["after a wake", "other weights", "hangs"])
def test_one_that_does_not_live_as_it_should(tmp_path, life, why):
    spec = replace(tiny_spec(tmp_path, "sdpa", tmp_path), start_timeout_s=TIMEOUT_S)
    with socket.socket() as channel:
        keeper = Keeper(spec, channel, UsersRay())
    keeper._ray = SimpleNamespace(wait=lambda tasks, timeout: ([], tasks), exceptions=exceptions)
    keeper._status = {}
    rests = []

    def rest(seconds):
        assert life, "it is missed in time"
        beat, away, lasts_s = life[0]
        keeper._status |= {"heartbeat": beat, "away": away}
        rests.append(seconds)
        if lasts_s is not None and len(rests) * POLL_S >= lasts_s:
            rests.clear()
            life.pop(0)

    rest(0)
    keeper._rest = rest
    with pytest.raises(DraftLost, match=why):
        keeper._result(None, TIMEOUT_S)
    assert len(life) == 1 and life[0][2] is None


MAPS = """
import ctypes, sys, threading, time
from pathlib import Path
from vllm_ssd.table import SpeculationTable
table = SpeculationTable.open(Path(sys.argv[1])) if sys.argv[2] != "another" else None
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
if sys.argv[2] == "without its first thread":
    ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("server_is", ["ours", "without its first thread", "another"])
def test_a_server_of_a_killed_keeper(tmp_path, server_is):
    """It is the one that has the table; another process may have its pid by now. It has ended with
    its last thread."""
    files = OwnFiles(TableShape(1, 2, 3), TableOwner("target"))
    table = rundir.table_path(files.run_dir)
    command = [sys.executable, "-c", MAPS, str(table), server_is]
    channel, other = socket.socketpair()
    with channel, other, subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        keeper = Keeper(tiny_spec(tmp_path, "sdpa", files.run_dir), channel, UsersRay())
        keeper._status = files.table.draft[0]
        keeper._status["pid"], keeper._status["heartbeat"] = server.pid, 1
        if server_is == "without its first thread":
            until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE)
        keeper._take_over(table)
        lives = server.poll() is None
        server.kill()
    assert lives == (server_is == "another") and not keeper._status["heartbeat"]
    files.remove()
