"""Shared and locked memory, and vLLM with its plugin."""

import resource
from types import SimpleNamespace

import pytest

from vllm_ssd.hooks import known_functions
from vllm_ssd.protocol import TableShape, rundir
from vllm_ssd.tools.check.machine import examine_locked_memory, examine_machine
from vllm_ssd.tools.check.software import examine_software

SHAPE = TableShape(slots=2, k=2, branches=3)


def first_of(shape):
    """The first finding for an engine with such a table."""
    before = set(rundir.living())
    found = next(examine_machine(SimpleNamespace(table=shape), all_backends=False))
    assert set(rundir.living()) == before, "it was there for a moment"
    return found


def test_a_table_with_room():
    found = first_of(SHAPE)
    assert found.state == "ok" and "the speculation table takes" in found.fact


def test_a_table_without_room():
    found = first_of(TableShape(slots=2**20, k=16, branches=512, top_m=128))
    assert found.state == "bad" and "--shm-size" in found.remedy


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


def test_another_version_of_vllm_ends_the_check(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.1.0")
    *_, last = examine_software()
    assert last.name == "platform" and last.state == "bad"
    assert "0.1.0" in last.fact and "install a supported vLLM" in last.remedy
