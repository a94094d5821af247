"""Memory: what vLLM asks for on CPUs, what a small table needs. And vLLM with its plugin."""

import os
import resource
import shutil
from collections import namedtuple

import pytest
from vllm import platforms
from vllm.utils import cpu_resource_utils

from tests.support.gpu_hosts import gpus
from vllm_ssd.hooks import known_functions
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir
from vllm_ssd.tools.check import software
from vllm_ssd.tools.check.host import (
    examine_locked_memory,
    examine_shared_memory,
    examine_target_memory,
)
from vllm_ssd.tools.check.software import examine_software

SHAPE = TableShape(slots=2, k=2, branches=3)


@pytest.fixture
def run_dir():
    made, locks = rundir.create()
    yield made
    rundir.remove(made)
    for lock in locks:
        os.close(lock)


@pytest.mark.parametrize(
    "free_gib, space, state, asked",
    [
        (18, None, "bad", "18.4 GiB"),
        (19, None, "ok", "18.4 GiB"),
        (18, "1", "ok", "1.0 GiB"),
        (18, "19", "bad", "19.0 GiB"),
    ],
)
def test_vllm_on_cpus_wants_most_of_the_memory(monkeypatch, free_gib, space, state, asked):
    """0.92 of 20 GiB must be free, unless the size of the KV cache is set."""
    node = cpu_resource_utils.MemoryNodeInfo(20 * 2**30, free_gib * 2**30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda _: node)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    (found,) = examine_target_memory()
    assert found.state == state and f"asks for {asked}" in found.fact
    assert ("VLLM_CPU_KVCACHE_SPACE" in found.remedy) == (state == "bad")


def test_vllm_on_gpus_asks_for_no_host_memory(monkeypatch):
    monkeypatch.setattr(platforms, "current_platform", gpus(1))
    assert not list(examine_target_memory())


@pytest.mark.parametrize("has_queue, state", [(False, "ok"), (True, "bad")])
def test_worker_processes_want_more_shared_memory(run_dir, monkeypatch, has_queue, state):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**26, 0, 2**26))
    (found,) = examine_shared_memory(run_dir, SHAPE, has_queue)
    assert found.state == state and bool(found.remedy) == has_queue
    assert SpeculationTable.open(rundir.table_path(run_dir)).shape == SHAPE


def test_a_table_without_room(run_dir):
    huge = TableShape(slots=2**20, k=16, branches=512, top_m=128)
    (found,) = examine_shared_memory(run_dir, huge, has_queue=False)
    assert found.state == "bad" and "--shm-size" in found.remedy
    assert not rundir.table_path(run_dir).exists()


@pytest.mark.parametrize(
    "limit, state", [(resource.RLIM_INFINITY, "ok"), (2**30, "ok"), (2**10, "note")]
)
def test_the_limit_of_locked_memory(monkeypatch, limit, state):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = examine_locked_memory(SHAPE)
    assert found.state == state and ("memlock" in found.remedy) == (state == "note")


def test_software_is_in_order(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert [each.state for each in examine_software()] == ["ok"] * 4


def test_functions_that_vllm_has_changed(monkeypatch):
    """Are a note: they may still do."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(known_functions, "KNOWN", frozenset())
    (note,) = (each for each in examine_software() if each.state != "ok")
    assert note.state == "note" and "install a released vLLM" in note.remedy
    assert "vllm.v1.executor.abstract.Executor.shutdown" in note.fact


def test_a_plugin_that_is_left_out(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    *_, last = examine_software()
    assert last.state == "bad" and last.remedy.startswith("add ssd")


def test_a_plugin_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(software, "entry_points", lambda **_: ())
    *_, last = examine_software()
    assert last.state == "bad" and "pip install" in last.remedy


def test_another_version_of_vllm_ends_the_check(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.1.0")
    *_, last = examine_software()
    assert last.name == "platform" and last.state == "bad"
    assert "0.1.0" in last.fact and "install a supported vLLM" in last.remedy
