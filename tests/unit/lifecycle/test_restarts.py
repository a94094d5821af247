"""When a draft that was lost is started again."""

from vllm_ssd.lifecycle.restarts import DOUBLINGS, FIRST_PAUSE_S, FORGIVEN_S, Restarts


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_pauses_double_up_to_a_bound():
    restarts = Restarts(2000, Clock())
    pauses = [restarts.pause() for _ in range(2000)]
    assert pauses[: DOUBLINGS + 1] == [FIRST_PAUSE_S * 2**n for n in range(DOUBLINGS + 1)]
    assert set(pauses[DOUBLINGS:]) == {FIRST_PAUSE_S * 2**DOUBLINGS}


def test_starts_in_a_row_are_limited():
    clock = Clock()
    restarts = Restarts(3, clock)
    for _ in range(3):
        restarts.served()
        clock.now += FORGIVEN_S - 1
        assert restarts.pause() is not None
    assert restarts.pause() is None
    assert restarts.pause() is None


def test_time_that_a_start_took_does_not_count():
    clock = Clock()
    restarts = Restarts(2, clock)
    restarts.served()
    clock.now += FORGIVEN_S - 1
    assert restarts.pause() is not None
    clock.now += FORGIVEN_S  # it never came to serve
    assert restarts.pause() is not None
    assert restarts.pause() is None
