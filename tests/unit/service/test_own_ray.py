"""The draft's Ray, started for real in a place where little of what it usually takes is there."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_ssd.service.own_ray import token_path

# Ends with its input. Ray kills workers where the host's memory is used to the threshold, which is
# reached at once here.
START = """
import json, os, sys, time
from pathlib import Path
from vllm_ssd.service import own_ray

run_dir = Path(sys.argv[1])
own_ray.set_environment(run_dir)
own = own_ray.OwnRay(run_dir)
own.start()
own_ray.token_path(run_dir).unlink()
own.stop()
assert not own.lives()
own.start()
import ray

@ray.remote(max_retries=0)
def work():
    time.sleep(3)
    return os.nice(0)

said = {"niceness": ray.get(work.remote()) - os.nice(0), "lives": own.lives()}
print(json.dumps(said | {"address": ray.get_runtime_context().gcs_address}), flush=True)
sys.stdin.read()
"""
ASK = """
import sys
from ray._raylet import GcsClient
print("keys:", GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, 10))
"""


@pytest.fixture(scope="module")
def ray():
    """What was seen of one that was started, then started again after a cleaner had been there."""
    environment = os.environ | {
        "HOME": "/proc/nowhere",
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_usage_threshold": "0.001",
    }
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", START, folder],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdin is not None and process.stdout is not None
            yield {"folder": Path(folder), **json.loads(process.stdout.readline())}
            process.stdin.close()


def test_it_needs_no_home_and_spares_the_draft_when_memory_is_short(ray):
    assert ray["lives"] and "niceness" in ray


def test_its_work_is_as_urgent_as_that_of_others(ray):
    assert ray["niceness"] == 0


@pytest.mark.parametrize("by_owner", [True, False])
def test_only_its_owner_can_talk_to_it(ray, by_owner):
    path = token_path(ray["folder"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, ray["address"]],
        env=os.environ | (known if by_owner else {"RAY_AUTH_MODE": "disabled"}),
        capture_output=True,
        text=True,
    )
    assert ("keys:" in done.stdout) == by_owner, done.stderr
