"""How far the draft runs ahead of a GPU, and that one which hangs is noticed."""

import pytest
import torch

from vllm_ssd.draft import in_flight
from vllm_ssd.draft.in_flight import InFlight


class Event:
    """The GPU reaches one where ``done`` says so; each piece of work takes 2 ms."""

    done = False

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, later: object) -> float:
        return 2.0


@pytest.fixture
def ahead(monkeypatch):
    """Two pieces of work in flight, and what was counted. The process was frozen while it started
    the first one."""
    now = 0.0
    monkeypatch.setattr(in_flight.time, "monotonic", lambda: now)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "done", False)
    counted: list[tuple[str, int, int]] = []
    made = InFlight(torch.device("cuda"), lambda *what: counted.append(what))
    for amount in (3, 4):
        assert made.ready()
        with made.timed("prefill", amount):
            now = in_flight.HANG_S + 1
    return made, counted


def test_two_pieces_and_no_more(ahead, monkeypatch):
    made, counted = ahead
    assert not made.ready() and not counted
    monkeypatch.setattr(Event, "done", True)
    assert made.ready()
    assert counted == [("prefill", 3, 2000), ("prefill", 4, 2000)]


def test_what_is_in_flight_is_waited_for(ahead, monkeypatch):
    made, counted = ahead
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        monkeypatch.setattr(Event, "done", len(looks) == 3)

    monkeypatch.setattr(in_flight.time, "sleep", sleep)
    made.finish()
    assert len(looks) == 3 and len(counted) == 2
    made.finish()
    assert len(looks) == 3, "nothing is"


def test_a_gpu_that_hangs(ahead, monkeypatch):
    made, _ = ahead
    monkeypatch.setattr(in_flight, "HANG_S", -1.0)
    with pytest.raises(TimeoutError, match="the GPU hangs"):
        made.ready()
    with pytest.raises(TimeoutError, match="the GPU hangs"):
        made.finish()
    monkeypatch.setattr(Event, "done", True)
    assert made.ready(), "late, as in a container that was frozen, but done"
