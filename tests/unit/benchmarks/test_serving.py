"""The served benchmarks without vLLM: command lines, sides, and what a load comes to."""

import asyncio
import json
from contextlib import ExitStack, contextmanager
from threading import Thread
from types import SimpleNamespace

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest

from benchmarks.common.about import about_run
from benchmarks.common.models import Model
from benchmarks.common.prompts import ANSWER
from benchmarks.common.server import ServerFailed
from benchmarks.serving import __main__ as serving
from benchmarks.serving import counters
from benchmarks.serving.arguments import parse
from benchmarks.serving.clients import vllm
from benchmarks.serving.clients.own import OwnClient
from benchmarks.serving.clients.task import ClientFailed, Task
from benchmarks.serving.datasets import find_dataset
from benchmarks.serving.measure import Measure, Started
from benchmarks.serving.records import KINDS, Load, Side
from benchmarks.serving.sides import Plan
from benchmarks.serving.table import markdown
from benchmarks.sharing import __main__ as sharing

TOGETHER = ("--sides", "plain,ssd", "--together")
SIDES = [
    Side(name, kind, 1, 1, {}, {}) for name, kind in (("one", "ssd"), ("broken", "draft_model"))
]


@contextmanager
def server():
    """One that streams answers of two messages, on a free port; yields its URL, and the prompts
    that it was asked."""
    loop, asked = asyncio.new_event_loop(), []

    async def completions(request):
        body = await request.json()
        asked.append(body["prompt"])
        response = web.StreamResponse()
        await response.prepare(request)
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        for message in (*({"choices": [{"text": body["prompt"][-1]}]} for _ in range(2)), usage):
            await response.write(f"data: {json.dumps(message)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve():
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    port = loop.run_until_complete(serve())
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_what_clients_see(tmp_path):
    """Times, numbers of tokens and texts; a chat's next turn has the server's answer."""
    with server() as (url, asked):
        load = Load("passages", 3, 9, concurrency=1, turns=2)
        chats = (f"a{ANSWER}b", "c", "d")
        seen = OwnClient().measure(Task(url, "tokenizer", load, chats, tmp_path))
    assert asked == ["a", "aaab", "c", "d"], "one turn after the other"
    assert (seen.completed, seen.tokens) == (4, 4 * 9), "a turn is a request"
    assert seen.texts == [ANSWER.join(["aa", "bb"]), "cc", "dd"]
    assert 0 < seen.ttft.p50 <= seen.ttft.p99 and seen.e2e.p99 < 1000 * seen.seconds
    # 2 messages have 1 time between them, 9 tokens have 8.
    assert seen.e2e.mean == pytest.approx(seen.ttft.mean + seen.itl.mean)
    assert seen.tpot.mean == pytest.approx(seen.itl.mean / 8)


def test_vllms_client_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "VLLM", ["sh", "-c", "echo no such server; exit 1"])
    task = Task("http://x", "tokenizer", Load("d", 1, 9), ("a",), tmp_path)
    with pytest.raises(ClientFailed, match="no such server"):
        vllm.VllmClient().measure(task)


@pytest.fixture
def measured(monkeypatch):
    """A function: what two sides come to, of two servers and of one that does not start, whose
    loads may begin until a time of the monotonic clock."""
    registry = CollectorRegistry()
    for name, value in (("num_drafts", 2), ("num_accepted_tokens", 5)):
        Counter(f"vllm:spec_decode_{name}", "told", registry=registry).inc(value)
    told = SimpleNamespace(text=generate_latest(registry).decode())
    monkeypatch.setattr(counters.httpx, "get", lambda url: told)

    def wait_healthy(limit_s):
        raise ServerFailed("no memory left")

    def measure(until):
        loads = [Load("d", 1, 5, 1), Load("d", 2, 5, 2)]
        prompts = SimpleNamespace(take=lambda load, first: ["ab"[first]] * load.requests)
        with ExitStack() as running:
            urls = [running.enter_context(server())[0] for _ in range(2)]
            up = [SimpleNamespace(url=url, run_dir=lambda: None, log="log") for url in urls]
            for each in up:
                each.wait_healthy = lambda limit_s: None
            broken = SimpleNamespace(wait_healthy=wait_healthy, log="log")
            sides = [Started(SIDES[0], up), Started(SIDES[1], [broken])]
            *_, results = Measure(["own"], loads, prompts, "t", 1.0, until).started(sides)
            return results

    return measure


def test_servers_of_a_side_count_together_and_one_that_fails_ends_no_other(measured):
    one, broken = measured(float("inf"))
    assert (one.error, broken.error) == (None, "no memory left") and not broken.runs
    assert [(run.seen.completed, run.seen.tokens) for run in one.runs] == [(2, 10), (4, 20)]
    assert [run.seen.texts for run in one.runs] == [["aa"], ["bb", "bb"]], "prompts of its own"
    table = markdown([one, broken])
    assert table.count("| one |") == 2 and "broken failed:\n\n```\nno memory left" in table


def test_no_load_begins_after_the_limit(measured):
    one, _ = measured(-1.0)
    assert not one.runs and one.error == "no time left for d, 1 clients"


def plan(**given) -> Plan:
    defaults = {"engine": {"model": "t"}, "kinds": KINDS, "gpus": 4, "eagle3": "head"}
    drafts = [Model("one", "one", "auto", "one")]
    return Plan(**{**defaults, "drafts": drafts, "k": [7], "f": [3], "other_k": [3], **given})


def test_every_side():
    sides = {side.name: side for side in plan().sides()}
    names = "plain, draft_model k=3, ngram k=3, eagle3 k=3, ssd-f0 k=7, ssd k=7 f=3"
    assert list(sides) == names.split(", ")
    told = {name: side.engine.get("speculative_config") for name, side in sides.items()}
    assert told["plain"] is None and told["eagle3 k=3"]["model"] == "head"
    assert told["ssd k=7 f=3"] == {"method": "ssd", "model": "one", "k": 7, "f": 3}
    assert told["ssd-f0 k=7"]["f"] == 0 and told["ssd-f0 k=7"]["on_miss"] == "wait"
    assert [sides["plain"].gpus, sides["ssd k=7 f=3"].gpus] == [1, 2]
    assert plan(kinds=["eagle3"], eagle3=None).sides() == []
    (given,) = plan(kinds=["eagle3"], accepted=[2.5]).sides()
    assert given.name == "eagle3 k=3 given 2.5"
    assert given.engine["speculative_config"]["synthetic_acceptance_length"] == 2.5
    small = plan(kinds=["plain", "ssd"], tps=[1, 2], gpus=2)
    assert [side.name for side in small.sides()] == ["plain TP 1", "ssd k=7 f=3 TP 1", "plain TP 2"]
    assert small.left_out() == ["ssd k=7 f=3 TP 2 needs 3 GPUs of 2"]
    args = parse([*TOGETHER, "plain=1", "ssd=0,1"], None)
    [group] = serving._groups(plan(kinds=args.sides).sides(), args.together)
    assert [side.environment["CUDA_VISIBLE_DEVICES"] for side in group] == ["1", "0,1"]


OWN = ("--client", "own")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--sides", "plain,magic"], "no such sides: magic; choose from plain, draft_model"),
        (["--client", "curl"], "no such clients: curl; choose from vllm, own"),
        (["--prompt-tokens", "4096"], "need --max-model-len 4416 or more"),
        ([*OWN, "--turns", "5"], "need --max-model-len 2240 or more"),
        (["--client", "vllm,own", "--turns", "5"], "--turns needs --client own"),
        (["--eagle3", "standin", "--accepted", "4.5"], "4.5: with k=3 a round has 1 to 4 tokens"),
        ([*TOGETHER, "plain=1"], "--together says nothing of ssd"),
        ([*TOGETHER, "plain=1", "ssd"], "'ssd' is not a kind of side and its GPUs"),
        ([*TOGETHER, "plain=1", "sssd=0"], "'sssd=0' is not a kind of side and its GPUs"),
        # What is missing.
        ([*OWN, "--dataset", "nothing"], "no data set 'nothing': write passages"),
        ([*OWN, "--dataset", "none.jsonl"], "there is no file none.jsonl"),
        ([*OWN, "--target", "hub/name", "--eagle3", "standin"], "hub/name is none"),
        ([*OWN, "--max-model-len", "9000"], "smollm2 takes texts of 8192 tokens"),
    ],
)
def test_a_bad_command_is_refused_before_anything_starts(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setattr(serving, "visible_gpus", lambda: pytest.fail("it has started"))
    try:
        status = serving.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2 and sentence in capsys.readouterr().err


def test_too_few_gpus_are_said_before_anything_starts(monkeypatch):
    subject = SimpleNamespace(gpus=[("GPU", 0)] * 3)
    monkeypatch.setattr(sharing, "find_subject", lambda *_: subject)
    with pytest.raises(SystemExit, match="3 engines and a draft need 4 GPUs, and there are 3"):
        sharing.main(["--engines", "3"])


@pytest.mark.parametrize("line", ["{", " ", "[]", '{"a": "2"}', '{"text": 2}', '{"turns": []}'])
def test_a_bad_line_of_a_data_set_is_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "one\u2028line"}\n{"question": "two", "answer": "2"}\n', "utf-8")
    assert find_dataset(str(path), 1).chats == [["one\u2028line"], ["two"]]
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(ValueError, match='line 2, has no "text", "prompt"'):
        find_dataset(str(path), 1)


def test_results_say_what_made_them():
    about = about_run("benchmarks.x", ["--k", "a b"], [], {"enforce_eager": True})
    assert about["command"] == "python -m benchmarks.x --k 'a b'"
    assert "CPU cores, " in about["machine"] and "torch" in about["versions"]
    assert about["compilation"] == "off" and about["commit"] and len(about["date"]) == 10
