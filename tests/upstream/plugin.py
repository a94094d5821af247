"""What pytest needs to run vLLM's tests with method ssd, and to see that they did."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from .inject import PLAIN, SEEN, register
from .listed import FILES, File

SHORT = "SSD_UPSTREAM_SHORT"
RESULTS = "SSD_UPSTREAM_RESULTS"
_STOP_S = 60.0
_RESULTS: dict[str, Counter[str]] = {}


def pytest_configure() -> None:
    register()
    import tests.utils

    tests.utils.wait_for_gpu_memory_to_clear = wait_for_processes_to_end


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """Files that are meant for GPUs only say so when they are imported."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with _cuda_for_tests(str(collector.config.rootpath)):
        return (yield)


@contextmanager
def _cuda_for_tests(root: str) -> Iterator[None]:
    from vllm.platforms import current_platform

    def is_cuda() -> bool:
        return sys._getframe(1).f_code.co_filename.startswith(root)

    with patch.object(current_platform, "is_cuda", is_cuda):
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of the list, whatever they ask of a GPU."""
    chosen = [item for item in items if _file(item).runs(item.name)]
    for item in chosen:
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    os.environ[PLAIN] = str(_file(item).plain_engines(item.name))


@pytest.fixture(scope="module", autouse=True)
def ran_with_ssd(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file's tests count only if an engine with ssd was started in it, and drafts of its were
    verified and accepted."""
    seen = Path(os.environ[SEEN])
    seen.write_text("")
    yield
    found = Counter(seen.read_text().split())
    _results(request.node).update(found)
    assert set(found) == _file(request.node).steps, f"with ssd there was {dict(found)}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome == "failed":
        path = report.nodeid.partition("::")[0].removeprefix("tests/")
        _RESULTS.setdefault(path, Counter())[report.outcome] += 1


def pytest_sessionfinish() -> None:
    """Keep what whole files came to, beside those of earlier runs."""
    results = Path(os.environ[RESULTS])
    before = json.loads(results.read_text()) if results.exists() else {}
    if not os.environ[SHORT]:
        results.write_text(json.dumps(before | _RESULTS, indent=1))


def wait_for_processes_to_end(**_: Any) -> None:
    """In place of a wait for a GPU's memory: nothing that an engine has started is left."""
    deadline = time.monotonic() + _STOP_S
    while left := [p for p in psutil.Process().children(recursive=True) if _is_of_engine(p)]:
        assert time.monotonic() < deadline, f"left after {_STOP_S:g} s: {left}"
        time.sleep(0.1)


def _is_of_engine(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _file(node: pytest.Item | pytest.Module) -> File:
    return FILES[str(node.path.relative_to(node.config.rootpath / "tests"))]


def _results(node: pytest.Module) -> Counter[str]:
    return _RESULTS.setdefault(_file(node).path, Counter())
