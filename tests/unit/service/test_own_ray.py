"""The draft's Ray, started for real in a place where little of what it usually takes is there."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.unit.service.fake_service import until
from vllm_ssd.bridge import cluster
from vllm_ssd.service.own_ray import OwnRay

# Beside its first Ray a process has an open port. Ends with its input.
# Ray kills workers where the host's memory is used to the threshold, which is reached at once here.
START = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from vllm_ssd.service import own_ray

run_dir = Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
own_ray.set_environment()
own = own_ray.OwnRay(run_dir)
LISTEN = "import socket, sys; s = socket.create_server(('0.0.0.0', 0))"
LISTEN += "; print(s.getsockname()[1], flush=True); sys.stdin.read()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
with subprocess.Popen([sys.executable, "-c", LISTEN], **pipes) as listens:
    port = int(listens.stdout.readline())
    try:
        own.start()
    except own_ray.DraftLost as error:
        said = {"open": str(error), "port": port, "stopped": not own.lives()}
own.start()
signal.raise_signal(signal.SIGTERM)
import ray

@ray.remote
class Worker:
    def work(self):
        print("a line", file=sys.stderr, flush=True)
        time.sleep(3)
        return os.nice(0)

worker = Worker.remote()
said |= {"niceness": ray.get(worker.work.remote()) - os.nice(0), "lives": own.lives()}
own.check_listeners()
said |= {"token": os.environ["RAY_AUTH_TOKEN"], "unseen": own.unseen}
said["address"] = ray.get_runtime_context().gcs_address
print(json.dumps(said), flush=True)
sys.stdin.read()
"""
ASK = """
import sys
from ray._raylet import GcsClient
print("keys:", GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, 10))
"""


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """What was seen of one that was refused, and of the next one, after a cleaner had been there.
    process: in which it runs."""
    log = tmp_path_factory.mktemp("log") / "log"
    environment = os.environ | {"HOME": "/proc/nowhere", "RAY_AUTH_MODE": "disabled"}
    environment["RAY_memory_usage_threshold"] = "0.001"
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        (folder := Path(place) / "vllm-ssd-0-t").mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", START, folder],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        with process:
            assert process.stdin is not None and process.stdout is not None
            said = json.loads(process.stdout.readline())
            yield {"process": process, "log": log, **said}
            process.stdin.close()
        assert process.returncode == 0


def test_it_needs_no_home_and_spares_the_draft_when_memory_is_short(ray):
    """And its work is as urgent as that of others."""
    assert ray["lives"] and ray["niceness"] == 0


def test_lines_of_its_process_get_no_prefix(ray):
    until(lambda: "a line" in ray["log"].read_text().splitlines())


@pytest.mark.parametrize("by_owner", [True, False])
def test_only_its_owner_can_talk_to_it(ray, by_owner):
    known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray["token"]}
    command = [sys.executable, "-c", ASK, ray["address"]]
    environment = os.environ | (known if by_owner else {"RAY_AUTH_MODE": "disabled"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ("keys:" in done.stdout) == by_owner, done.stderr


def test_it_is_no_cluster_of_the_users(ray, monkeypatch):
    """Ray's "auto" finds it, and would try for long to join it. Other tests' Rays are left out."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    found = psutil.Process(ray["process"].pid).children(recursive=True)
    for each in found:
        each.info = each.as_dict(["name", "cmdline"])
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: found)
    with pytest.raises(ValueError, match="only drafts' own Rays run on this node"):
        cluster.connect("auto")


def test_one_that_others_could_reach_is_refused(ray):
    assert ray["stopped"] and "other machines could reach the draft's Ray" in ray["open"]
    assert f"at 0.0.0.0 port {ray['port']} listens: install ray==" in ray["open"]
    assert not ray["unseen"], "where all of it listens can be seen"


def denied(process, kind):
    raise psutil.AccessDenied(process.pid)


@pytest.mark.parametrize("look", [denied, lambda *_: []], ids=["denied", "nothing"])
def test_what_cannot_be_looked_at_is_said_and_does_not_end_the_start(
    tmp_path, monkeypatch, caplog, look
):
    monkeypatch.setattr(psutil.Process, "net_connections", look)
    own = OwnRay(tmp_path)
    for _ in range(2):
        own.check_listeners()
    (line,) = [record.getMessage() for record in caplog.records]
    assert own.unseen and "it is not known whether other machines can reach" in line
