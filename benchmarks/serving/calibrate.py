"""Do the clients tell the same of the same load? Each asks a server that keeps a set pace, so that
what they should say is known:

    python -m benchmarks.serving.calibrate --client vllm,sglang,own

The server answers as one that speculates: the first token by itself, then several at a time.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from aiohttp import web

from benchmarks.common.arguments import chosen_from
from benchmarks.common.models import SMOLLM2, find_model
from benchmarks.common.server import NAME
from benchmarks.serving.clients import CLIENTS
from benchmarks.serving.clients.client import Answer, Task, sum_up
from benchmarks.serving.records import Load, Result, Run, Seen, Side
from benchmarks.serving.table import markdown

TTFT_S, ITL_S, TOKENS_A_MESSAGE = 0.1, 0.08, 4
LOAD = Load("set pace", requests=40, tokens=64, concurrency=2, prompt_tokens=32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: a row for what is so, and one for what each client says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.calibrate")
    clients = chosen_from(list(CLIENTS), "clients")
    parser.add_argument("--client", type=clients, default=list(CLIENTS), help="default: all")
    parser.add_argument("--models", type=Path, default=Path(".models"), help="for a tokenizer")
    args = parser.parse_args(arguments)
    tokenizer = find_model(SMOLLM2, args.models, "auto").path
    prompts = [f"This is prompt number {number}, of some words." for number in range(LOAD.requests)]
    side = Side("set pace", "plain", 1, 0, {}, {})
    runs = [Run("(so it is)", LOAD, truth())]
    with paced_server() as url:
        for client in args.client:
            CLIENTS[client].check()
            with tempfile.TemporaryDirectory() as scratch:
                task = Task(url, tokenizer, LOAD, prompts, {}, Path(scratch))
                runs.append(Run(client, LOAD, CLIENTS[client].measure(task)))
    print(markdown([Result(side, runs)]))
    return 0


def truth() -> Seen:
    """What a perfect client says of a server that loses no time."""
    messages = [count for count, _ in _messages(LOAD.tokens)]
    itls = [ITL_S] * (len(messages) - 1)
    answer = Answer(TTFT_S, itls, TTFT_S + sum(itls), LOAD.tokens)
    assert LOAD.concurrency is not None
    rounds = LOAD.requests / LOAD.concurrency
    return sum_up([answer] * LOAD.requests, rounds * answer.e2e_s, {})


@contextmanager
def paced_server() -> Iterator[str]:
    """A server of OpenAI completions on a free port of this machine; yields its URL."""
    loop = asyncio.new_event_loop()
    runner = loop.run_until_complete(_serve())
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _serve() -> web.AppRunner:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/metrics", _metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def _complete(request: web.Request) -> web.StreamResponse:
    clock = asyncio.get_running_loop().time
    begun = clock()
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    for count, due_s in _messages(body["max_tokens"]):
        # By the clock, so that the lateness of one message is not the next one's.
        await asyncio.sleep(max(0.0, begun + due_s - clock()))
        await _write(response, {"choices": [{"index": 0, "text": "a " * count}]})
    if body.get("stream_options", {}).get("include_usage"):
        usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}
        await _write(response, {"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    return response


def _messages(tokens: int) -> Iterator[tuple[int, float]]:
    """(tokens, seconds after the request) of each message of an answer."""
    yield 1, TTFT_S
    for number, sent in enumerate(range(1, tokens, TOKENS_A_MESSAGE), 1):
        yield min(TOKENS_A_MESSAGE, tokens - sent), TTFT_S + number * ITL_S


async def _write(response: web.StreamResponse, message: dict[str, object]) -> None:
    await response.write(f"data: {json.dumps(message)}\n\n".encode())


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": NAME}]})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(text="")


if __name__ == "__main__":
    sys.exit(main())
