"""Engines for tests, and ways to look at them from outside."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from benchmarks.common.running import counters, leftovers, run_dir_of
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.rundir import table_path

ENGINE: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8}
# The worker in the engine core's process, as vLLM has it by itself on one GPU. On a CPU it would be
# in one of its own, for OpenMP's settings: 7 s of a core more for imports, and in each step both
# would spin while they wait for each other.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
if not torch.cuda.is_available():
    ENGINE["distributed_executor_backend"] = ONE_PROCESS
# As vLLM has it by itself on a CPU.
OWN_PROCESS = {"distributed_executor_backend": "mp"}
# Drafts of tests are as slow as their targets, or slower: they would never be worth a wait.
SSD = {"method": "ssd", "on_miss": "wait"}
# A draft of real size takes a third of its time in bfloat16, on CPUs that compute in it. How it
# rounds changes how often it is right, and no text.
LIGHT = {"draft_dtype": "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "auto"}
# A target whose steps last until the draft is ahead of it, however slow the machine is.
PATIENT = {"worker_cls": "tests.support.patient_target.PatientWorker"}
# Beside other tests on two cores a start may take minutes; only a hang takes longer than this.
START_S, END_S = 600.0, 60.0


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """The first true value of ``condition``; an assertion naming ``what`` if there is none."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
        time.sleep(0.1)
    return value


def wait_gone(
    run_dir: Path, processes: Sequence[psutil.Process] = (), timeout_s: float = END_S
) -> None:
    """Until nothing is left of an engine or a draft that ends: its files, and its ``processes``."""
    deadline = time.monotonic() + timeout_s
    while left := leftovers(run_dir, processes):
        assert time.monotonic() < deadline, f"left after {timeout_s:g} s: {left}"
        time.sleep(0.1)


@contextmanager
def engine(model: str, **options: Any) -> Iterator[Any]:
    """An offline ``LLM``, shut down at the end."""
    from vllm import LLM

    llm = LLM(model, **{**ENGINE, "max_model_len": 512, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm


def own_run_dir() -> Path:
    """The run directory of the engine that this process has started; others may be running."""
    found = run_dir_of(psutil.Process().children(recursive=True))
    assert found is not None, "no engine of this process has a draft"
    return found


def accepted_drafts(run_dir: Path) -> int:
    """Draft tokens of all requests of an engine so far."""
    lengths: list[int] = counters(run_dir)["accepted"]
    return sum(drafts * times for drafts, times in enumerate(lengths))


def serves(counted: dict[str, Any]) -> bool:
    """Whether the draft of an engine is at work, by its counters."""
    return counted["heartbeat"] > 0 and psutil.pid_exists(counted["pid"])


@contextmanager
def damage(run_dir: Path) -> Iterator[None]:
    """Meanwhile: random bytes anywhere in what the draft says, a thousand times a second."""
    table = SpeculationTable.open(table_path(run_dir))
    first = table.slots.dtype.fields["state"][1]
    size = table.slots.itemsize - first
    chance = random.Random(1)
    of_draft = table.slots.view(np.uint8).reshape(len(table.slots), -1)[:, first:]

    done = threading.Event()

    def write() -> None:
        while not done.wait(1e-3):
            slot, start = chance.randrange(len(of_draft)), chance.randrange(size)
            noise = chance.randbytes(min(chance.choice([1, 8, 64]), size - start))
            of_draft[slot, start : start + len(noise)] = np.frombuffer(noise, np.uint8)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            yield
        finally:
            done.set()
        writing.result()


def tokens_after(url: str, model: str, prompt: str, tokens: int) -> list[int]:
    """The greedy text of a server after this prompt."""
    asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    asked["return_token_ids"] = True
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=START_S).raise_for_status()
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def greedy(max_tokens: int = 64, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def texts(outputs: Sequence[Any]) -> list[tuple[list[int], str | None]]:
    """Token ids and finish reason of each output."""
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]
