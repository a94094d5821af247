"""When the keeper takes a draft server that runs for lost, without Ray."""

import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray import exceptions

from tests.support.loaded_draft import tiny_spec
from vllm_ssd.lifecycle.keeper import HANG_S, POLL_S, Keeper
from vllm_ssd.lifecycle.own_ray import DraftLost, UsersRay
from vllm_ssd.protocol import ASLEEP, RELOADING

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
