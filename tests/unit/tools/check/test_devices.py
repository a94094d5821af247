"""What is found about devices: memory, attention, the table, and a trial whose process dies."""

from __future__ import annotations

import sys
from subprocess import CompletedProcess

import pytest
import torch

from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.sdpa import SDPAAttention
from vllm_ssd.protocol import SpeculationTable, TableShape, pages
from vllm_ssd.tools.check import devices
from vllm_ssd.tools.check.devices import (
    Draft,
    DraftMemory,
    Trial,
    examine_device,
    judge_memory,
    try_gpu,
)
from vllm_ssd.tools.check.findings import GIB
from vllm_ssd.tools.check.trials import last_words

CPU = torch.device("cpu")
ATTENTION = AttentionShape(2, 4, 2, 16, 0.25, torch.bfloat16, CPU)


def look(*backends: str, left_out=(), memory=None, all_backends=False):
    draft = Draft(ATTENTION, backends, left_out, memory)
    return list(examine_device(Trial("cores 0", draft, all_backends), CPU))


@pytest.mark.parametrize(
    "free, need, state",
    [
        (50, DraftMemory(2 * GIB, 40 * GIB, 2**20), "ok"),
        (50, DraftMemory(2 * GIB, 40 * GIB, 2**20, of_free=0.8), "note"),
        (50, DraftMemory(2 * GIB, 40 * GIB, 2**20, states=9 * GIB), "note"),
        (50, DraftMemory(None, 60 * GIB, 2**20), "note"),
        (2, DraftMemory(2 * GIB, 40 * GIB, 2**20), "bad"),
        (1, DraftMemory(2 * GIB, 40 * GIB, 2**20), "bad"),
    ],
)
def test_weights_and_kv_cache_must_fit(free, need, state):
    memory = judge_memory(need, free * GIB)
    assert memory.state == state and bool(memory.remedy) == (state != "ok")


class Deaf(SDPAAttention):
    """Computes nothing."""

    def tree_plan(self, rows, steps):
        plan = super().tree_plan(rows, steps)
        right = plan.attend
        plan.attend = lambda *inputs: torch.zeros_like(right(*inputs))
        return plan


@pytest.fixture
def deaf(monkeypatch):
    """Makes the backend "triton" one that computes nothing."""
    from vllm_ssd.draft.attention import self_test

    def load(name):
        return Deaf if name == "triton" else SDPAAttention

    monkeypatch.setattr(self_test, "load_backend", load)


def test_the_first_sound_backend_is_used(deaf):
    device, wrong, right, missing = look("triton", "sdpa", left_out=[("flashinfer", "is missing")])
    assert device.state == "ok" and "free on cores 0 (CPU)" in device.fact
    assert wrong.state == "note" and "triton is wrong" in wrong.fact
    assert "if another one is right" in wrong.remedy
    assert right.state == "ok" and "is used" in right.fact
    assert missing.state == "ok" and "flashinfer is missing" in missing.fact


def test_a_chosen_backend_that_is_wrong_is_bad(deaf):
    *_, found = look("triton")
    assert found.state == "bad" and "sdpa" in found.remedy


@pytest.mark.parametrize("all_backends", [False, True])
def test_what_would_not_be_used_is_tried_on_demand(deaf, all_backends):
    _, used, other = look("sdpa", "triton", all_backends=all_backends)
    assert used.fact.startswith("sdpa: right")
    assert ("not tried" in other.fact) == (not all_backends)


@pytest.mark.parametrize("graphs, state", [(True, "bad"), (False, "ok")])
def test_a_table_out_of_reach(tmp_path, monkeypatch, graphs, state):
    """The target needs it; the draft needs it if it publishes from the GPU."""

    def refuse(table, device):
        raise OSError("no atomics")

    SpeculationTable.create(tmp_path / "table", TableShape(slots=2, k=2, branches=3))
    monkeypatch.setattr(pages, "register", refuse)
    monkeypatch.setattr(Deaf, "graphs", graphs)
    monkeypatch.setattr(devices, "load_backend", lambda _: Deaf)
    draft = Draft(ATTENTION, ("sdpa",), (), None)
    users = ("draft", "target")
    trial = Trial("GPU 1", draft, table=str(tmp_path / "table"), users=users)
    *_, of_draft, of_target = examine_device(trial, CPU)
    assert of_draft.state == state and of_target.state == "bad"
    for found in (of_draft, of_target):
        assert "GPU 1 cannot reach it (no atomics)" in found.fact
        assert bool(found.remedy) == (found.state == "bad")


def test_a_trial_in_a_process_without_a_gpu(monkeypatch):
    """Its end is found, too, with its last words."""
    monkeypatch.setattr(devices, "LIMIT_S", 120.0)
    draft = Draft(ATTENTION, ("sdpa",), (), None)
    (found,) = try_gpu(Trial("GPU 7", draft), {"PYTHONPATH": ":".join(sys.path)})
    assert found.state == "bad" and found.fact.startswith("GPU 7 cannot be used (")


def died(errors: bytes) -> CompletedProcess[bytes]:
    return CompletedProcess([], -6, b"a library", errors)


def test_a_trial_that_ends_its_process():
    """ROCm ends a process whose kernel uses an address that the GPU does not have."""
    fault = b"Memory access fault by GPU node-2 on address 0x7f10. Reason: Unknown."
    stack = b'\nFatal Python error: Aborted\n  File "pages.py", line 90 in register\n'
    assert last_words(died(fault + stack)) == fault.decode()
    assert last_words(died(b"")) == "exit status -6"
    assert last_words(died(b"a\nRuntimeError: no GPU\n")) == "RuntimeError: no GPU"
