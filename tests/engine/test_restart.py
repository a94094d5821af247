"""The draft of a server dies twice, under 16 streamed requests at all times: none fails or stalls,
every text is the target's own, the drafts come back and hit as before, the log has one line of each
loss and of each return, and nothing is used up. All ways to die are in
tests/unit/service/test_deaths.py."""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks.common import server as serve
from benchmarks.soak.requests import Question
from tests.engine.deaths import Draft, out_of_memory, without_keeper
from tests.engine.load import Load
from tests.support.greedy_texts import tiny_answers
from tests.support.harness import ENGINE, OWN_PROCESS, PATIENT, SSD, START_S, wait_gone
from tests.support.scraping import scrape
from vllm_ssd.metrics import rates, subtract
from vllm_ssd.table import rundir

AT_ONCE, OTHERS, TOKENS = 16, 12, 64
ROUNDS = 100  # in which hits are counted
AS_BEFORE = 0.8  # of the usual share of hits
SLACK = 8  # open files that may come or go
# Of a process, about a leak of 1 MiB each time; of the target's worker more, as there vLLM keeps
# primitives of oneDNN, for every layer and up to 128 sizes of a batch.
GROWTH_MIB, GROWTH_OF_WORKER_MIB = 10, 200
# A line of the server's own, not one of the draft's or of Ray's.
OWN_LINE = re.compile(
    r"^\((?:APIServer|EngineCore|Worker)\S* pid=\d+\) (WARNING|ERROR) .*?\] "
    r"(SSD: the draft is (?:lost|back)|SSD: the draft's keeper is gone|.*)",
    re.MULTILINE,
)
LOST, BACK = ("ERROR", "SSD: the draft is lost"), ("WARNING", "SSD: the draft is back")
KEEPER_GONE = ("ERROR", "SSD: the draft's keeper is gone")


@pytest.fixture
def served(tiny, tmp_path):
    """A server with method ssd, and requests with the target's own answers: more than run at once,
    each of another length. (No token means anything.)"""
    options = {"max_num_seqs": AT_ONCE, "max_model_len": 256, "skip_tokenizer_init": True}
    arguments = {**ENGINE, **OWN_PROCESS, **PATIENT, **options, "model": str(tiny)}
    # "auto" would try other plans now and then, which have other hits.
    arguments["speculative_config"] = {**SSD, "k": 3, "f": 1, "model": str(tiny)}
    prompts = [[(7 * n + m**2) % 400 for m in range(5 + 2 * n)] for n in range(AT_ONCE + OTHERS)]
    with serve.Server(arguments, tmp_path / "server.log") as server:
        plain = tiny_answers(tiny, prompts, TOKENS)
        server.wait_healthy(START_S)
        questions = [Question(prompt, TOKENS) for prompt in prompts]
        yield server, Load(server.url, AT_ONCE, questions, plain)


def test_the_draft_comes_back_every_time(served):
    server, load = served
    draft = Draft(server.run_dir())
    with load.running():
        usual = max(at_work(draft, load) for _ in range(2))
        assert usual > 0.5, "the draft does not have the time it needs"
        before, log = usage(server, draft), Log(server.log)
        pid = draft.counted()["pid"]
        out_of_memory(draft, load)
        assert scrape(server.url)["vllm:ssd_draft_up"] == {("0",): 0}
        load.until("new draft", lambda: not draft.silent())
        load.until("its metrics", lambda: scrape(server.url)["vllm:ssd_draft_up"]["0",] == 1)
        restarts = scrape(server.url)["vllm:ssd_draft_restarts_total"]
        assert restarts == {("0",): 1}
        load.until("hits as before", lambda: AS_BEFORE * usual <= at_work(draft, load))
        assert pid not in {process.pid for process in draft.processes()}
        assert draft.server().rlimit(psutil.RLIMIT_AS)[0] == psutil.RLIM_INFINITY
        assert log.news() == [LOST, BACK]
        load.until("the same processes", lambda: kinds(server, draft) == before.kinds)
        after = usage(server, draft)
        # Then this: another keeper takes the place of the one whose memory was looked at.
        pid = draft.counted()["pid"]
        without_keeper(draft)
        load.until("loss of the draft, without keeper", draft.silent)
        load.until("new draft, with another keeper", lambda: not draft.silent())
        load.until("hits as before", lambda: AS_BEFORE * usual <= at_work(draft, load))
        assert pid not in {process.pid for process in draft.processes()}
        assert log.news() == [KEEPER_GONE, BACK]
    assert after.shared == before.shared == [rundir.table_path(draft.run_dir).name]
    assert after.files == pytest.approx(before.files, abs=SLACK)
    for name, mib in after.mib.items():
        limit = GROWTH_OF_WORKER_MIB if "Worker" in name else GROWTH_MIB
        assert mib - before.mib[name] < limit, name
    load.check()
    assert load.outcome.compared == load.outcome.finished >= AT_ONCE
    assert draft.counted()["restarts"] == 2
    seen = [*server.processes(), *draft.seen.values()]
    server.end()
    wait_gone(draft.run_dir, seen, 90)


def at_work(draft: Draft, load: Load) -> float:
    """The share of hits in the next rounds."""
    before = draft.counted()
    rounds = before["rounds"] + ROUNDS
    load.until("rounds", lambda: draft.counted()["rounds"] >= rounds)
    share: float = rates(subtract(draft.counted(), before))["hit"]
    return share


class Log:
    """Warnings and errors of a server, from now on."""

    def __init__(self, path: Path):
        self._path = path
        self._read = len(self._lines())

    def news(self) -> list[tuple[str, str]]:
        """Their levels and texts since the last look; what is said of the draft without reasons."""
        new = self._lines()[self._read :]
        self._read += len(new)
        return new

    def _lines(self) -> list[tuple[str, str]]:
        return OWN_LINE.findall(self._path.read_text(errors="replace"))


@dataclass(frozen=True)
class Usage:
    """kinds: the number of processes by name. files, mib: open files and MiB of resident memory of
    each process that outlives the draft's deaths. shared: names in shared memory."""

    kinds: Counter[str]
    files: dict[str, int]
    mib: dict[str, float]
    shared: list[str]


def usage(server: serve.Server, draft: Draft) -> Usage:
    """What a server and its draft have in use now."""
    lasting = [*server.processes(), *draft.named("vllm_ssd.service.keeper")]
    table = rundir.table_path(draft.run_dir)
    return Usage(
        kinds=kinds(server, draft),
        files={f"{p.name()} {p.pid}": p.num_fds() for p in lasting},
        mib={f"{p.name()} {p.pid}": p.memory_info().rss / 2**20 for p in lasting},
        shared=[path.name for path in table.parent.glob(f"*{draft.run_dir.name}*")],
    )


def kinds(server: serve.Server, draft: Draft) -> Counter[str]:
    """The number of processes by name."""
    found: Counter[str] = Counter()
    for process in (*server.processes(), *draft.processes()):
        with suppress(psutil.NoSuchProcess):
            found[process.name()] += 1
    return found
