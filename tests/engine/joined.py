"""Servers that have joined the draft service ``NAME``."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import server as serve
from benchmarks.common.running import counters
from benchmarks.soak.requests import Choice, Question
from tests.engine.load import Load
from tests.support.draft_command import BACK, NAME
from tests.support.greedy_texts import tiny_answers
from tests.support.harness import ENGINE, PATIENT, START_S
from vllm_ssd.metrics import rates, subtract

AT_ONCE, TOKENS, ROUNDS = 3, 48, 60  # requests of each server, tokens of each, rounds looked at
SPECULATION = {"method": "ssd", "draft_server": NAME, "on_miss": "wait"}
OPTIONS = {**ENGINE, **PATIENT, "max_model_len": 256, "skip_tokenizer_init": True}


@dataclass
class Joined:
    """A server, what it is asked, and the target's own answers. load: the newest one."""

    server: serve.Server
    run_dir: Path
    questions: list[Question]
    answers: list[Choice]
    load: Load = field(init=False)

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Meanwhile; no request fails, and no text is another than the plain one."""
        self.load = Load(self.server.url, AT_ONCE, self.questions, self.answers)
        with self.load.running():
            yield
        self.load.check()
        assert self.load.outcome.compared >= AT_ONCE

    def rounds(self) -> dict[str, Any]:
        """What is counted in the next rounds."""
        before = counters(self.run_dir)
        end = before["rounds"] + ROUNDS
        self.load.until("rounds", lambda: counters(self.run_dir)["rounds"] >= end)
        return subtract(counters(self.run_dir), before)

    def has_hits(self) -> bool:
        """Whether the next rounds have as many as those of a draft that is at work."""
        return bool(rates(self.rounds())["hit"] > 0.2)

    def wait_back(self, returns: int) -> None:
        """Until there are drafts again. returns: of the draft by then, as the log has them."""
        self.load.until("return", lambda: self.said(BACK) == returns and self.serves())
        self.load.until("hits", self.has_hits)

    def serves(self) -> bool:
        return bool(counters(self.run_dir)["heartbeat"])

    def said(self, text: str) -> int:
        """How often the log has this."""
        return self.server.log.read_text(errors="replace").count(text)


@contextmanager
def joined(target: Path, folder: Path, number: int, **options: str) -> Iterator[list[Joined]]:
    """As many of this target, with logs in ``folder``. options: of method ssd."""
    arguments = {**OPTIONS, "model": str(target), "speculative_config": SPECULATION | options}
    prompts = [[(7 * n + m**2) % 400 for m in range(5 + 2 * n)] for n in range(number * AT_ONCE)]
    with ExitStack() as ends:
        logs = [folder / f"server-{n}.log" for n in range(number)]
        servers = [ends.enter_context(serve.Server(arguments, log)) for log in logs]
        answers = tiny_answers(target, prompts, TOKENS)
        made = []
        for first, server in enumerate(servers):
            server.wait_healthy(START_S)
            run_dir = server.run_dir()
            assert run_dir is not None
            questions = [Question(prompt, TOKENS) for prompt in prompts[first::number]]
            made.append(Joined(server, run_dir, questions, answers[first::number]))
        yield made
