"""The clients without a server of vLLM's: what they ask, and what they say of the answers."""

import asyncio
import json
import stat
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from aiohttp import web

from benchmarks.serving import calibrate
from benchmarks.serving.clients import own, sglang, vllm
from benchmarks.serving.clients.client import Answer, ClientFailed, Task, sum_up
from benchmarks.serving.clients.own import OwnClient
from benchmarks.serving.records import Load


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


def task(url: str, scratch: Path, prompts=("a", "b", "c", "d"), **load) -> Task:
    asked = Load("passages", len(prompts), load.pop("tokens", 9), **load)
    return Task(url, "tokenizer", asked, prompts, {"ttft": 1e9, "tpot": 0.0}, scratch)


def test_what_clients_see(tmp_path):
    running, most, asked = 0, 0, []

    async def answer(body, write):
        nonlocal running, most
        running += 1
        most = max(most, running)
        asked.append(body["prompt"])
        for _ in range(4):
            await asyncio.sleep(0.01)
            await write({"choices": [{"text": "a"}]})
        running -= 1
        await write({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})

    with _server(answer) as url:
        seen = OwnClient().measure(task(url, tmp_path, concurrency=2, temperature=0.5))
    assert most == 2 and sorted(asked) == ["a", "b", "c", "d"]
    assert seen.completed == 4 and seen.tokens == 4 * 9
    assert len(seen.ttfts_ms) == 4 and len(seen.itls_ms) == 4 * 3
    assert 0 < seen.ttft.p50 <= seen.ttft.p99 and seen.gap.mean >= seen.itl.mean > 0
    whole = seen.ttft.mean + sum(seen.itls_ms) / 4
    assert seen.e2e.mean == pytest.approx(whole, abs=0.01) and seen.e2e.p99 < 1000 * seen.seconds
    assert seen.tpot.mean == pytest.approx(sum(seen.itls_ms) / 4 / 8, abs=0.01)
    assert seen.good == 0, "no answer keeps a bound of 0 ms a token"


def test_requests_arrive_at_a_rate(tmp_path, monkeypatch):
    """All are asked although none is answered, with a pause after each."""
    arrived, rates = 0, []

    class Chance:
        def __init__(self, seed):
            pass

        def expovariate(self, rate):
            rates.append(rate)
            return 0.0

    async def answer(body, write):
        nonlocal arrived
        arrived += 1
        while arrived < 4:
            await asyncio.sleep(0.01)
        await write({"choices": [{"text": "a"}]})
        await write({"choices": [], "usage": {"completion_tokens": 1}})

    monkeypatch.setattr(own, "random", SimpleNamespace(Random=Chance))
    with _server(answer) as url:
        OwnClient().measure(task(url, tmp_path, rate=10.0))
    assert rates == [10.0] * 4


def test_an_answer_without_its_end_is_an_error(tmp_path):
    async def answer(body, write):
        await write({"choices": [{"text": "a"}]})

    with _server(answer) as url, pytest.raises(ClientFailed, match="ended early"):
        OwnClient().measure(task(url, tmp_path, prompts=("a",)))


def test_good_answers_keep_all_bounds():
    quick = Answer(0.1, [0.1], 0.3, 3)
    slow = Answer(0.1, [0.9], 1.1, 3)
    seen = sum_up([quick, slow], 2.0, {"ttft": 200.0, "tpot": 100.5})
    assert seen.good == 0.5 and seen.tokens == 6
    assert sum_up([quick, slow], 2.0, {}).good is None
    assert Answer(0.1, [], 0.1, 1).tpot_s is None, "one token"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A client's program that says its arguments and writes what it is told to; yields a function
    that makes it."""

    def make(module, name, code):
        path = tmp_path / "program"
        path.write_text(f"#!/usr/bin/env python3\nimport json, sys\nargs = sys.argv[1:]\n{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(module, name, path)

    return make


PRINTED = """
Mean E2E Latency (ms):                   400.00
Median E2E Latency (ms):                 390.00
Mean TTFT (ms):                          50.50
Median TTFT (ms):                        49.00
P99 TTFT (ms):                           60.00
Mean TPOT (ms):                          11.00
Median TPOT (ms):                        10.00
P99 TPOT (ms):                           12.00
Mean ITL (ms):                           31.00
Median ITL (ms):                         30.00
P99 ITL (ms):                            32.00
"""


def test_sglangs_client(program, tmp_path):
    program(
        sglang,
        "PYTHON",
        f"""
told = dict(zip(args[2::2], args[3::2]))
turns = json.load(open(told["--dataset-path"]))
assert [t["conversations"][0]["value"] for t in turns] == ["a", "b"], turns
assert told["--max-concurrency"] == "2" and json.loads(told["--extra-request-body"]) == {{
    "temperature": 0.5}}
line = dict(completed=2, duration=4.0, total_output_tokens=18)
open(told["--output-file"], "w").write(json.dumps(line))
print({PRINTED!r})
""".replace(
            "args[2::2], args[3::2]",
            "[a for a in args if a != '--disable-tqdm'][2::2], "
            "[a for a in args if a != '--disable-tqdm'][3::2]",
        ),
    )
    seen = sglang.SglangClient().measure(
        task("http://x", tmp_path, ("a", "b"), concurrency=2, temperature=0.5)
    )
    assert (seen.completed, seen.seconds, seen.tokens) == (2, 4.0, 18)
    assert seen.e2e.mean == 400 and seen.e2e.p99 is None
    assert (seen.ttft.mean, seen.itl.p50, seen.tpot.p99) == (50.5, 30, 12)
    assert seen.gap is None and seen.good is None and seen.ttfts_ms == []


def test_sglangs_client_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setattr(sglang, "PYTHON", tmp_path / "none")
    with pytest.raises(ValueError, match="make bench-clients"):
        sglang.SglangClient().check()


def test_vllms_client(program, tmp_path):
    told = {f"{which}_{name}_ms": 5.0 for which in ("mean", "p50", "p99")
            for name in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
    told |= {"completed": 2, "failed": 0, "duration": 4.0, "total_output_tokens": 18}
    told |= {"ttfts": [0.1, 0.2], "itls": [[0.01, 0.03], [0.02]], "request_goodput": 0.25}
    program(
        vllm,
        "VLLM",
        f"""
assert args[:2] == ["bench", "serve"] and "tpot:0" in args and "--request-rate" in args
folder = args[args.index("--result-dir") + 1]
lines = open(folder + "/prompts.jsonl").read().splitlines()
assert [json.loads(line)["prompt"] for line in lines] == ["a", "b"]
open(folder + "/seen.json", "w").write({json.dumps(json.dumps(told))})
""",
    )
    seen = vllm.VllmClient().measure(task("http://x", tmp_path, ("a", "b"), rate=2.0))
    assert (seen.completed, seen.tokens, seen.good) == (2, 18, 0.25)
    assert seen.ttfts_ms == [100.0, 200.0] and seen.itls_ms == [10.0, 30.0, 20.0]
    assert seen.gap.mean == pytest.approx(25.0)


@pytest.mark.parametrize(
    "module, name, client",
    [(vllm, "VLLM", vllm.VllmClient()), (sglang, "PYTHON", sglang.SglangClient())],
)
def test_a_client_that_fails_says_why(program, tmp_path, module, name, client):
    program(module, name, "sys.exit('no such server')")
    with pytest.raises(ClientFailed, match="no such server"):
        client.measure(task("http://x", tmp_path))


def test_calibration_counts_every_token(tmp_path):
    """An answer at the set pace is complete, whatever its length; times are for the reader."""
    for tokens in (1, 2, 5, 6):
        with calibrate.paced_server() as url:
            seen = OwnClient().measure(task(url, tmp_path, ("a",), tokens=tokens))
        assert seen.tokens == tokens and len(seen.itls_ms) == -(-(tokens - 1) // 4)
    so = calibrate.truth()
    assert so.tokens == 40 * 64 and so.ttft.p50 == 100 and so.itl.p50 == pytest.approx(80)
    assert so.tokens / so.seconds == pytest.approx(2 * 64 / (0.1 + 16 * 0.08))
