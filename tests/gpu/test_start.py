"""Starts on GPUs that are full, taken or not there: a sentence and an exit status, or no drafts if
they are not required."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.running import counters
from tests.gpu.settings import GPUS, OPTIONS
from tests.support.harness import engine, greedy, own_run_dir
from tests.support.starts import make_start
from vllm_ssd.service.placement import gpu_environment

EAGER = {**OPTIONS, "enforce_eager": True}
TARGETS, DRAFTS = 0, min(GPUS, 2) - 1  # with one GPU it is the target's too
HOLD = """
import sys, torch

device, left = int(sys.argv[1]), int(sys.argv[2])
torch.cuda.set_device(device)
held = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def full(device: int, left_mib: int) -> Iterator[None]:
    """Meanwhile another process holds all memory of a GPU but ``left_mib`` MiB."""
    command = [sys.executable, "-c", HOLD, str(device), str(left_mib * 2**20)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            yield
        finally:
            holder.kill()


@pytest.fixture
def start(models: tuple[str, str], tmp_path: Path) -> Callable[..., str]:
    """Starts an engine with options of method ssd, and others of the engine's."""
    target, draft = models

    def run(device: int, engine: dict[str, Any] | None = None, **options: Any) -> str:
        options |= {"model": draft, "draft_device": device}
        start = make_start(tmp_path, "tests.gpu.conftest", target, **{**EAGER, **(engine or {})})
        return start(**options)

    return run


needs_two = pytest.mark.skipif(GPUS < 2, reason="needs a second GPU, for a target that has memory")


def no_memory(said: str) -> list[str]:
    """The sentences in which a start says that the GPU of the draft has none."""
    name = re.escape(gpu_environment(DRAFTS, False)["CUDA_VISIBLE_DEVICES"])
    return re.findall(
        rf"SSD: the draft could not be started: MemoryError: the draft's GPU "
        rf"\(CUDA_VISIBLE_DEVICES={name}\) has too little free memory \([^\n]+\): end what else "
        rf"runs there[^\n]* or name another GPU with draft_device in --speculative-config",
        said,
    )


@needs_two
@pytest.mark.parametrize("left_mib", [64, 768], ids=["no CUDA context", "no weights"])
def test_a_full_gpu(start, left_mib):
    """What a CUDA context takes depends on the GPU; the sentence does not."""
    with full(DRAFTS, left_mib):
        said = start(DRAFTS, serves=False)
    assert no_memory(said), said


@needs_two
def test_a_full_gpu_of_a_draft_that_is_not_required(start):
    with full(DRAFTS, 64):
        said = start(DRAFTS, serves=True, required=False)
    assert no_memory(said) and "serving begins without drafts" in said, said


def test_a_gpu_that_is_not_there(start):
    said = start(GPUS, serves=False)
    assert f"draft_device {GPUS} does not exist: choose from 0 to {GPUS - 1}" in said, said


def test_the_targets_gpu(start):
    """Allowed, and for development only."""
    said = start(TARGETS, serves=True)
    assert f"SSD: draft_device {TARGETS} is a GPU of the target" in said, said
    assert "could not be started" not in said, said


def test_the_targets_gpu_where_the_target_wants_all_memory(start):
    """The draft, which comes first, is said to be there; what is missing says vLLM."""
    said = start(TARGETS, {"gpu_memory_utilization": 0.99}, serves=False)
    assert "--gpu-memory-utilization must leave room for the draft's weights" in said, said
    assert "is less than desired GPU memory utilization (0.99" in said, said


def test_a_gpu_with_another_engines_draft(start, models):
    """Allowed: each takes the memory that it needs, and both draft."""
    speculation = {"method": "ssd", "k": 3, "f": 1, "model": models[1], "draft_device": DRAFTS}
    with engine(models[0], speculative_config=speculation, **EAGER) as llm:
        said = start(DRAFTS, serves=True)
        assert "could not be started" not in said, said
        run_dir = own_run_dir()
        llm.generate(["A river is"], greedy(64), use_tqdm=False)
        assert sum(counters(run_dir)["accepted"][1:]) > 0
