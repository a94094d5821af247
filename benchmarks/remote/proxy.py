"""TCP with a delay: ``python -m benchmarks.remote.proxy PORT HOST:PORT``. Whatever comes to the port
goes to the address, and back, each after the newest number of milliseconds on stdin, 0 at first."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time

_CHUNK = 2**18


class Delay:
    """``seconds`` of each direction."""

    seconds = 0.0


def forward(source: socket.socket, sink: socket.socket, delay: Delay) -> None:
    """Until either side ends."""
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        while True:
            due, data = under_way.get()
            time.sleep(max(due - time.monotonic(), 0))
            try:
                sink.sendall(data) if data else sink.shutdown(socket.SHUT_WR)
            except OSError:
                return
            if not data:
                return

    threading.Thread(target=deliver, daemon=True).start()
    data = b"."
    while data:
        try:
            data = source.recv(_CHUNK)
        except OSError:
            data = b""
        under_way.put((time.monotonic() + delay.seconds, data))


def main(port: str, address: str) -> None:
    host, _, there = address.rpartition(":")
    delay = Delay()
    listener = socket.create_server(("127.0.0.1", int(port)))

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection((host, int(there)), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for one, other in ((near, far), (far, near)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=forward, args=(one, other, delay), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    for line in sys.stdin:
        delay.seconds = float(line) / 1000


if __name__ == "__main__":
    main(*sys.argv[1:])
