"""The served benchmark without a server: its figures of a stream, its table, its sides."""

import asyncio
import json
from contextlib import contextmanager
from threading import Thread

import aiohttp
import pytest
from aiohttp import web

from benchmarks.serve.__main__ import main
from benchmarks.serve.client import Figures, load
from benchmarks.serve.table import markdown


@contextmanager
def _server(answer):
    """A server on a free port that streams with ``answer(body, write)``; yields its URL."""
    loop, ready = asyncio.new_event_loop(), []

    async def completions(request):
        response = web.StreamResponse()
        await response.prepare(request)

        async def write(message):
            await response.write(f"data: {json.dumps(message)}\n\n".encode())

        await answer(await request.json(), write)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve():
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.append(runner.addresses[0][1])

    loop.run_until_complete(serve())
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{ready[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_what_clients_see():
    running, most, asked = 0, 0, []

    async def answer(body, write):
        nonlocal running, most
        running += 1
        most = max(most, running)
        asked.append(body["prompt"])
        for pause_s in (0.1, 0.0, 0.3, 0.0):
            await asyncio.sleep(pause_s)
            await write({"choices": [{"text": "a"}]})
        running -= 1
        await write({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})

    with _server(answer) as url:
        found = load(url, [[1], [2], [3]], clients=2, requests=4, tokens=9, temperature=0.5)
    assert most == 2 and sorted(asked) == [[1], [1], [2], [3]]
    assert found.requests == 4 and found.clients == 2 and found.temperature == 0.5
    assert 100 <= found.ttft_ms[0] <= found.ttft_ms[1]
    assert 300 <= found.gap_ms[0] <= found.gap_ms[1]
    assert found.tokens_s < 4 * 9 / 0.8


def test_an_answer_without_its_end_is_an_error():
    async def answer(body, write):
        await write({"choices": [{"text": "a"}]})

    with _server(answer) as url, pytest.raises(aiohttp.ClientError, match="ended early"):
        load(url, [[1]], clients=1, requests=1, tokens=9, temperature=0)


def test_table_has_ratios_to_plain():
    def figures(clients, tokens_s, ttft):
        return Figures(clients, 0.0, 4, tokens_s, (ttft, 2 * ttft), (10.0, 20.0))

    table = markdown(
        {
            "plain": [figures(1, 100.0, 30.0), figures(4, 200.0, 40.0)],
            "ssd": [figures(1, 250.0, 33.0), figures(4, 100.0, 80.0)],
        }
    ).splitlines()
    cells = [line.strip("| ").split(" | ") for line in table[2:]]
    assert [row[2] for row in cells] == ["plain", "ssd", "plain", "ssd"]
    assert cells[1][3:8] == ["250.0", "2.50", "33", "1.10", "66"]
    assert cells[3][4] == "0.50" and cells[3][6] == "2.00" and cells[0][4] == "–"


def test_table_without_plain():
    assert "–" in markdown({"ssd": [Figures(1, 0.0, 1, 5.0, (1.0, 1.0), (0.0, 0.0))]})


def test_unknown_sides_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--sides", "plain,eagle"])
    assert "no such sides: eagle; choose from plain, draft_model, ssd" in capsys.readouterr().err
