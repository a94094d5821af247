"""The clients without a server of vLLM's: what they ask, and what they say of the answers."""

import asyncio
import json
import stat
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from aiohttp import web

from benchmarks.common.prompts import ANSWER
from benchmarks.serving.clients import vllm
from benchmarks.serving.clients.own import Answer, OwnClient, sum_up
from benchmarks.serving.clients.task import ClientFailed, Task
from benchmarks.serving.records import Load


@contextmanager
def streaming_server(answer):
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


def task(url: str, scratch: Path, prompts=("a", "b", "c", "d"), **load) -> Task:
    asked = Load("passages", len(prompts), load.pop("tokens", 9), **load)
    return Task(url, "tokenizer", asked, prompts, scratch)


def test_what_clients_see(tmp_path):
    running, most, asked = 0, 0, []

    async def answer(body, write):
        nonlocal running, most
        running += 1
        most = max(most, running)
        asked.append(body["prompt"])
        for _ in range(4):
            await asyncio.sleep(0.01)
            await write({"choices": [{"text": body["prompt"]}]})
        running -= 1
        await write({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})

    with streaming_server(answer) as url:
        seen = OwnClient().measure(task(url, tmp_path, concurrency=2, temperature=0.5))
    assert most == 2 and sorted(asked) == ["a", "b", "c", "d"]
    assert seen.completed == 4 and seen.tokens == 4 * 9
    assert seen.texts == ["aaaa", "bbbb", "cccc", "dddd"]
    assert 0 < seen.ttft.p50 <= seen.ttft.p99 and seen.gap.mean >= seen.itl.mean > 0
    assert seen.e2e.p99 < 1000 * seen.seconds
    # 4 messages have 3 times between them, 9 tokens have 8.
    assert seen.e2e.mean == pytest.approx(seen.ttft.mean + 3 * seen.itl.mean)
    assert seen.tpot.mean == pytest.approx(3 * seen.itl.mean / 8)


def test_a_chat_has_the_answers_of_the_server(tmp_path):
    asked = []

    async def answer(body, write):
        asked.append(body["prompt"])
        for letter in "xyz"[: len(asked)]:
            await write({"choices": [{"text": letter}]})
        await write({"choices": [], "usage": {"completion_tokens": len(asked)}})

    with streaming_server(answer) as url:
        chats = (f"a{ANSWER}b{ANSWER}c", "d")
        seen = OwnClient().measure(task(url, tmp_path, chats, concurrency=1, turns=3))
    assert asked == ["a", "axb", "axbxyc", "d"], "one turn after the other"
    assert (seen.completed, seen.tokens) == (4, 1 + 2 + 3 + 4), "a turn is a request"
    assert seen.texts == [ANSWER.join(["x", "xy", "xyz"]), "xyz"], "whole chats"


def test_an_answer_without_its_number_of_tokens_is_an_error(tmp_path):
    async def answer(body, write):
        await write({"choices": [{"text": "a"}]})

    with streaming_server(answer) as url, pytest.raises(ClientFailed, match="has no tokens"):
        OwnClient().measure(task(url, tmp_path, prompts=("a",)))


def test_percentiles():
    answers = [Answer([0.1, 0.1 + itl], "ab", 3) for itl in (0.1, 0.2, 0.9)]
    seen = sum_up([answers, [Answer([0.2], "a", 1)]], 2.0)
    assert (seen.completed, seen.tokens) == (4, 10)
    assert seen.ttft.mean == pytest.approx(125) and seen.ttft.p50 == pytest.approx(100)
    assert seen.itl.p50 == pytest.approx(200) and seen.itl.p99 == pytest.approx(886)
    assert seen.tpot.mean == pytest.approx(200), "an answer of one token has none"
    assert seen.gap.mean == pytest.approx(300)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A client's program that says its arguments and writes what it is told to; yields a function
    that makes it."""

    def make(code):
        path = tmp_path / "program"
        path.write_text(f"#!/usr/bin/env python3\nimport json, sys\nargs = sys.argv[1:]\n{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(vllm, "VLLM", [str(path)])

    return make


def test_vllms_client(program, tmp_path):
    told = {f"{which}_{name}_ms": 5.0 for which in ("mean", "p50", "p99")
            for name in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
    told |= {"completed": 2, "failed": 0, "duration": 4.0, "total_output_tokens": 18}
    told |= {"itls": [[0.01, 0.03], [0.02]], "generated_texts": ["x", "y"]}
    program(f"""
assert args[:2] == ["bench", "serve"] and "--max-concurrency" in args
folder = args[args.index("--result-dir") + 1]
lines = open(folder + "/prompts.jsonl").read().splitlines()
assert [json.loads(line)["prompt"] for line in lines] == ["a", "b"]
open(folder + "/seen.json", "w").write({json.dumps(json.dumps(told))})
""")
    seen = vllm.VllmClient().measure(task("http://x", tmp_path, ("a", "b"), concurrency=2))
    assert (seen.completed, seen.tokens, seen.texts) == (2, 18, ["x", "y"])
    assert seen.gap.mean == pytest.approx(25.0)


def test_a_client_that_fails_says_why(program, tmp_path):
    program("sys.exit('no such server')")
    with pytest.raises(ClientFailed, match="no such server"):
        vllm.VllmClient().measure(task("http://x", tmp_path))
