"""A port for a server that takes seconds to start, which nobody else is given meanwhile."""

import socket


def held_port() -> tuple[int, socket.socket]:
    """Return a free port of 127.0.0.1, and the socket that holds it until it is closed.

    Linux gives a held port to no socket that asks for any free one, to listen or to connect. A
    server that sets ``SO_REUSEADDR``, as vLLM's does, can still listen there."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder.getsockname()[1], holder
