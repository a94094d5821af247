"""When a draft that was lost is started again."""

import time
from types import SimpleNamespace

from vllm_ssd.service import launch
from vllm_ssd.service.launch import FORGIVEN_S, Restarts


def test_starts_in_a_row_are_limited(monkeypatch):
    """Service makes up for them, and the time that a start takes does not."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(launch, "time", clock)
    one = Restarts(2)
    one.served()
    now += FORGIVEN_S - 1
    assert one.again()
    now += FORGIVEN_S
    assert one.again()
    assert not one.again() and not one.again()
    one.served()
    now += FORGIVEN_S
    assert [one.again() for _ in range(3)] == [True, True, False]
