"""Real models and engines for the engine tests. Models are made once, in ``.models``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.time_table import pytest_configure, pytest_terminal_summary  # noqa: F401

ROOT = Path(__file__).parents[2]

# Small enough for a CPU machine, and the runner that the plugin supports on CPUs.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# Two files run at a time, on two cores: the longest come first, lest one be left at the end.
LONGEST = [
    f"test_{name}.py"
    for name in (
        "draft_service",
        "remote_draft",
        "restart",
        "lossless",
        "server",
        "features",
        "tune",
    )
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="session")
def target() -> str:
    """SmolLM2-135M-Instruct."""
    from benchmarks.standin import ensure_smollm2

    return str(ensure_smollm2(ROOT / ".models"))


@pytest.fixture(scope="session")
def draft() -> str:
    """The same without layer 14: it agrees with the target on most tokens."""
    from benchmarks.standin import ensure_draft

    return str(ensure_draft(ROOT / ".models"))


@pytest.fixture(scope="session")
def even_target() -> str:
    """SmolLM2's function with a number of heads that two ranks can share."""
    from benchmarks.standin import ensure_target

    return str(ensure_target(ROOT / ".models", "even", "float32"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A random function of 400 tokens, without a tokenizer."""
    from benchmarks.standin.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def tiny_pair(tiny, tmp_path_factory) -> tuple[Path, Path]:
    """(wide, small): one function at a large cost and at a small one."""
    from benchmarks.standin import Shape
    from benchmarks.standin.tiny import widened

    shape = Shape(1024, 24, 16, 8, 64, 4096)
    return widened(tiny, tmp_path_factory.mktemp("wide"), shape), tiny


@pytest.fixture(scope="session")
def busy_pair(tiny, tmp_path_factory) -> tuple[Path, Path]:
    """The same for 16 requests at once: a core takes a tenth of a second for a step."""
    from benchmarks.standin import Shape
    from benchmarks.standin.tiny import widened

    shape = Shape(512, 12, 8, 4, 64, 2048)
    return widened(tiny, tmp_path_factory.mktemp("wide"), shape), tiny
