"""`vllm bench serve` as the client."""

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common.server import NAME, VLLM
from benchmarks.serving.clients.own import spread
from benchmarks.serving.clients.task import ClientFailed, Task
from benchmarks.serving.records import Seen, Spread

_LAST_WORDS = 3000


class VllmClient:
    """vLLM's own, from this environment."""

    def check(self) -> None:
        """It reads prompts with pandas."""
        if importlib.util.find_spec("pandas") is None:
            raise ValueError("--client vllm needs pandas: pip install pandas, or --client own")

    def measure(self, task: Task) -> Seen:
        """Run a load. `ClientFailed` if a request fails."""
        prompts = task.scratch / "prompts.jsonl"
        lines = [json.dumps({"prompt": prompt}) for prompt in task.prompts]
        prompts.write_text("\n".join(lines), encoding="utf-8")
        command = [*VLLM, *_arguments(task, prompts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seen = task.scratch / "seen.json"
        told = {} if done.returncode else json.loads(seen.read_text(encoding="utf-8"))
        # It takes an answer that broke off for a whole one.
        if told.get("output_lens") != [task.load.tokens] * task.load.requests:
            raise ClientFailed(f"vllm bench serve failed:\n{done.stdout[-_LAST_WORDS:]}")
        return _seen(told)


def _arguments(task: Task, prompts: Path) -> list[str]:
    load = task.load
    words = ["bench", "serve", "--base-url", task.url, "--served-model-name", NAME]
    words += ["--model", task.tokenizer, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    # Prompts have their chat template already, and come in the same order on every side.
    words += ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm", "--ignore-eos"]
    words += ["--custom-output-len", str(load.tokens), "--num-prompts", str(load.requests)]
    words += ["--temperature", str(load.temperature), "--save-result", "--save-detailed"]
    words += ["--result-dir", str(task.scratch), "--result-filename", "seen.json"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
    if load.concurrency is not None:
        words += ["--max-concurrency", str(load.concurrency)]
    return words


def _seen(told: dict[str, Any]) -> Seen:
    def found(name: str) -> Spread:
        return Spread(*(told[f"{which}_{name}_ms"] for which in ("mean", "p50", "p99")))

    return Seen(
        completed=told["completed"],
        seconds=told["duration"],
        tokens=told["total_output_tokens"],
        e2e=found("e2el"),
        ttft=found("ttft"),
        itl=found("itl"),
        tpot=found("tpot"),
        gap=spread([max(of_answer, default=0.0) for of_answer in told["itls"]]),
        texts=told["generated_texts"],
    )
