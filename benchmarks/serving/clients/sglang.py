"""`python -m sglang.bench_serving --backend vllm` as the client, from an environment of its own."""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.common.server import NAME
from benchmarks.serving.clients.task import ClientFailed, Task, check_completed, run_program
from benchmarks.serving.records import Seen, Spread

_ROOT = Path(__file__).parents[3]
PYTHON = _ROOT / ".venv-bench" / "bin" / "python"
_LONGEST = 1024  # tokens of a prompt; it leaves out longer ones
_SENT_AS_IT_IS = _LONGEST - 24  # of one that may be some tokens longer than said


class SglangClient:
    """The reference engine's yardstick. It takes every answer to have as many tokens as asked for,
    tells no single times, and asks the first prompt once more before it begins."""

    longest_prompt: int | None = _LONGEST

    def check(self) -> None:
        """Its environment must have been made."""
        if not PYTHON.exists():
            raise ValueError("--client sglang needs its own environment: run `make bench-clients`")

    def measure(self, task: Task) -> Seen:
        """Run a load. `ClientFailed` if a request fails."""
        prompts = task.scratch / "prompts.json"
        answer = "It takes conversations, and only those with an answer."
        turns = [[{"value": prompt}, {"value": answer}] for prompt in task.prompts]
        prompts.write_text(json.dumps([{"conversations": pair} for pair in turns]))
        # It looks for a model of the served one's name, for a warning only.
        offline = {"HF_HUB_OFFLINE": "1"} if Path(task.tokenizer).exists() else {}
        command = [str(PYTHON), "-m", "sglang.bench_serving", *_arguments(task, prompts)]
        printed = run_program("sglang.bench_serving", command, offline)
        told = json.loads((task.scratch / "seen.jsonl").read_text(encoding="utf-8"))
        check_completed(task, told["completed"], printed)
        return _seen(told, printed)


def _arguments(task: Task, prompts: Path) -> list[str]:
    load = task.load
    words = ["--backend", "vllm", "--base-url", task.url, "--model", NAME]
    words += ["--tokenizer", task.tokenizer, "--num-prompts", str(load.requests)]
    words += ["--dataset-path", str(prompts), "--disable-tqdm"]
    words += ["--output-file", str(task.scratch / "seen.jsonl")]
    words += ["--extra-request-body", json.dumps({"temperature": load.temperature})]
    if load.prompt_tokens is None or load.prompt_tokens <= _SENT_AS_IT_IS:
        words += ["--dataset-name", "sharegpt", "--sharegpt-output-len", str(load.tokens)]
    else:
        # What it calls random is the file's prompts, cut or repeated to just this length.
        words += ["--dataset-name", "random", "--random-range-ratio", "1"]
        words += ["--random-input-len", str(load.prompt_tokens)]
        words += ["--random-output-len", str(load.tokens)]
    if load.concurrency is not None:
        words += ["--max-concurrency", str(load.concurrency)]
    return words


def _seen(told: dict[str, Any], printed: str) -> Seen:
    def line(words: str) -> float:
        found = re.search(rf"^{re.escape(words)} \(ms\): +([\d.]+)", printed, re.MULTILINE)
        if found is None:
            raise ClientFailed(f"sglang.bench_serving printed no {words!r}:\n{printed}")
        return float(found[1])

    def found(name: str) -> Spread:
        return Spread(line(f"Mean {name}"), line(f"Median {name}"), line(f"P99 {name}"))

    e2e = "E2E Latency"
    return Seen(
        completed=told["completed"],
        seconds=told["duration"],
        tokens=told["total_output_tokens"],
        e2e=Spread(line(f"Mean {e2e}"), line(f"Median {e2e}"), None),
        ttft=found("TTFT"),
        itl=found("ITL"),
        tpot=found("TPOT"),
    )
