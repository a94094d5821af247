"""When the keeper takes a draft server that runs for lost, without Ray."""

import os
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from tests.support.loaded_draft import tiny_spec
from vllm_ssd.lifecycle import actor
from vllm_ssd.lifecycle.actor import HANG_S, DraftActor, DraftLost
from vllm_ssd.lifecycle.own_ray import UsersRay
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.protocol import ASLEEP, RELOADING, TableOwner, TableShape

TIMEOUT_S = 2.0


@pytest.fixture
def serving(tmp_path):
    """One whose server has served, and this process is."""
    files = OwnFiles(TableShape(1, 2, 3), TableOwner("target"))
    spec = replace(tiny_spec(tmp_path, "sdpa", files.run_dir), start_timeout_s=TIMEOUT_S)
    one = DraftActor(spec, UsersRay())
    one._ray = SimpleNamespace(
        wait=lambda tasks, timeout: ([], tasks), exceptions=one._ray.exceptions
    )
    one._process, one._serving = psutil.Process(os.getpid()), True
    yield one
    files.remove()


def looks(one, seconds):
    """As many as in this time."""
    for _ in range(int(seconds / actor.POLL_S) + 2):
        one.result()


@pytest.mark.parametrize("away", [0, RELOADING], ids=["after a wake", "other weights"])
def test_one_that_does_not_finish_loading_again(serving, away):
    serving._status["away"] = away
    with pytest.raises(DraftLost, match=r"not loaded again within 2 s \(start_timeout_s\)"):
        looks(serving, TIMEOUT_S)


def test_one_that_sleeps_is_not_missed_for_as_long(serving):
    serving._status["away"] = ASLEEP
    looks(serving, 3 * HANG_S)
    serving._status["away"] = 0
    looks(serving, TIMEOUT_S / 2)
    serving._status["heartbeat"] = 1
    looks(serving, HANG_S / 2)
    with pytest.raises(DraftLost, match="no sign of life"):
        looks(serving, HANG_S)
