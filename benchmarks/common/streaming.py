"""Streamed completions over HTTP: what the benchmarks' own clients have in common."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

_DATA = b"data: "


class RequestFailed(Exception):
    """The server refused a request, or its answer ended early."""


@asynccontextmanager
async def session(url: str, stall_limit_s: float) -> AsyncGenerator[aiohttp.ClientSession, None]:
    """Any number of connections to a server. A request that gets nothing for ``stall_limit_s``
    seconds fails with `TimeoutError`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=stall_limit_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as opened:
        yield opened


async def stream(opened: aiohttp.ClientSession, body: dict[str, Any]) -> AsyncGenerator[bytes]:
    """The JSON of each message of an answer, as it arrives, not yet decoded. `RequestFailed` if the
    server refuses or the stream ends without its end mark."""
    async with opened.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RequestFailed(f"the server refused a request: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(_DATA):
                yield line[len(_DATA) :]
    raise RequestFailed("an answer ended early")
