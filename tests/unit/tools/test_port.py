"""A held port is its server's: nobody else listens there, and vLLM's server does."""

import socket

import pytest
from vllm.entrypoints.launchers.launcher import create_server_socket

from vllm_ssd.tools.port import held_port


@pytest.mark.parametrize("reuse_port", [False, True])
def test_only_its_server_gets_a_held_port(reuse_port):
    port, holder = held_port()
    address = ("127.0.0.1", port)
    with holder:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with create_server_socket(address, reuse_port=reuse_port) as server:
            server.listen()
            socket.create_connection(address, timeout=10).close()
