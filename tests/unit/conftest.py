"""What every unit test leaves as it was."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

# An example may take long on a busy machine and be right nevertheless.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# Or the commands, which print and do not log, would set it for the process that all tests share.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


@pytest.fixture(autouse=True)
def same_environment():
    """vLLM sets variables when a config is made (LD_PRELOAD, VLLM_*), and Ray when it starts:
    engines that are started later in this process would inherit them."""
    before = dict(os.environ)
    yield
    if os.environ != before:  # or threads of a module's fixtures would see it empty for a moment
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def make_run_dir():
    """Makes run directories, each with its locks. What holds one lives until these are closed."""
    from vllm_ssd.table import rundir

    made = []

    def make() -> tuple[Path, list[int]]:
        made.append(rundir.create())
        return made[-1]

    yield make
    for run_dir, locks in made:
        close(locks)
        rundir.remove(run_dir)


def close(locks: list[int]) -> None:
    while locks:
        os.close(locks.pop())


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> SimpleNamespace:
    """A tiny target, a tiny draft, and another one with another vocabulary."""
    from tests.support.model_folders import write_model

    def make(name: str, **shape) -> str:
        return write_model(tmp_path_factory.mktemp(name), **shape)

    others = [f"v{i}" for i in range(60)]
    return SimpleNamespace(
        target=make("target", layers=2), draft=make("draft"), other=make("other", words=others)
    )


@pytest.fixture(scope="session")
def _hub_home(tmp_path_factory) -> Path:
    from tests.support.hub_cache import store_configs

    home: Path = tmp_path_factory.mktemp("hub")
    store_configs(home)
    return home


@pytest.fixture
def hub(_hub_home, monkeypatch) -> None:
    """The models of ``tests/support/hub_cache.py`` are found by their names, offline. vLLM looks
    twice for what is not there, and does not wait in between."""
    from huggingface_hub import constants
    from vllm.transformers_utils import repo_utils

    monkeypatch.setattr(repo_utils, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(_hub_home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
