"""A wire between two nodes whose delay and loss are chosen, also while it is in use.

A process hands every packet on between two virtual interfaces, so that TCP on both nodes meets what
it would on a network: what is lost it has to send again.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.sharedctypes import Synchronized

_MTU = 1500
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000  # of linux/if_tun.h
_PR_SET_TIMERSLACK = 29


class Wire:
    """delay_s: of a packet in either direction, in seconds, beside the time that the process takes.
    loss: share of packets that do not arrive. Set them at any time."""

    def __init__(self, names: tuple[str, str]):
        """names: of the interfaces, which it makes on this node."""
        self._ends = [_interface(name) for name in names]
        self._delay = multiprocessing.Value("d", 0.0)
        self._loss = multiprocessing.Value("d", 0.0)

    @contextmanager
    def carrying(self) -> Iterator[Wire]:
        """Meanwhile; its interfaces are gone afterwards."""
        process = multiprocessing.get_context("fork").Process(
            target=_carry, args=(self._ends, self._delay, self._loss), daemon=True
        )
        process.start()
        for end in self._ends:
            os.close(end)
        try:
            yield self
        finally:
            process.kill()
            process.join()

    def set(self, delay_s: float, loss: float) -> None:
        self._delay.value = delay_s
        self._loss.value = loss


def _interface(name: str) -> int:
    """A file whose reads and writes are the packets of a new interface."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(end, _TUNSETIFF, request)
    return end


def _carry(ends: list[int], delay: Synchronized[float], loss: Synchronized[float]) -> None:
    """Until it is killed. Packets of one delay arrive in the order in which they were sent."""
    # The kernel would wake this process up to 50 us late.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    drawn = random.Random(0)
    under_way: list[tuple[float, int, bytes, int]] = []
    number = 0
    while True:
        pause = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
        readable, _, _ = select.select(ends, [], [], pause)
        for end in readable:
            packet = os.read(end, 2 * _MTU)
            if drawn.random() >= loss.value:
                number += 1
                due = time.monotonic() + delay.value
                heapq.heappush(under_way, (due, number, packet, ends[end == ends[0]]))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, packet, to = heapq.heappop(under_way)
            with suppress(OSError):  # lost, as the interface there is down
                os.write(to, packet)
