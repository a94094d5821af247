"""What is said of devices by what their trials have found."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest
import torch

from vllm_ssd.draft.attention.sdpa import SDPAAttention
from vllm_ssd.tools.check.device_trial import (
    Heads,
    Report,
    Trial,
    TriedBackend,
    last_words,
    try_cpu,
)
from vllm_ssd.tools.check.devices import (
    DraftMemory,
    look_at_backends,
    look_at_memory,
    look_at_reach,
)
from vllm_ssd.tools.check.findings import GIB

HEADS = Heads(layers=2, heads=4, kv_heads=2, head_dim=16, dtype="bfloat16")


def report(free: int = 100 * GIB, **fields) -> Report:
    return Report("NVIDIA H200", free, 140 * GIB, [], **fields)


def tried(backend: str, fault: str | None) -> TriedBackend:
    return TriedBackend(backend, fault, 2.0, 0.01, graphs=fault is None and backend == "triton")


@pytest.mark.parametrize(
    "free, need, state",
    [
        (50, DraftMemory(2 * GIB, 40 * GIB, 2**20), "ok"),
        (50, DraftMemory(2 * GIB, 40 * GIB, 2**20, of_free=0.8), "note"),
        (50, DraftMemory(None, 60 * GIB, 2**20), "note"),
        (2, DraftMemory(2 * GIB, 40 * GIB, 2**20), "bad"),
        (1, DraftMemory(2 * GIB, 40 * GIB, 2**20), "bad"),
    ],
)
def test_weights_and_kv_cache_must_fit(free, need, state):
    device, memory = look_at_memory("GPU 1", report(free * GIB), need)
    assert device.state == "ok" and f"{free}" in device.fact
    assert memory.state == state and bool(memory.remedy) == (state != "ok")


def test_no_draft_needs_nothing():
    (device,) = look_at_memory("GPU 1", report(), None)
    assert "100 GiB of 140 GiB" in device.fact


def test_the_first_sound_backend_is_used():
    wrong = tried("triton", "is wrong on this GPU")
    both, missing = ("triton", "sdpa"), [("flashinfer", "is missing")]
    found = list(look_at_backends(both, [wrong, tried("sdpa", None)], missing))
    assert [each.state for each in found] == ["note", "ok", "ok"]
    assert "sdpa is used instead" in found[0].remedy and "is used" in found[1].fact


def test_a_chosen_backend_that_is_wrong_is_bad():
    wrong = tried("triton", "does not run on this GPU (no)")
    (found,) = look_at_backends(("triton",), [wrong], [])
    assert found.state == "bad" and "sdpa" in found.remedy


def test_what_would_not_be_used_is_not_tried():
    used, other = look_at_backends(("triton", "sdpa"), [tried("triton", None)], [])
    assert used.fact.startswith("triton: right") and other.fact.startswith("sdpa: not tried")


@pytest.mark.parametrize("remedy, state", [("pass them through", "bad"), ("", "ok")])
def test_a_table_out_of_reach(remedy, state):
    found = look_at_reach("draft", "GPU 1", report(out_of_reach="no atomics"), remedy)
    assert (found.state, found.remedy) == (state, remedy) and "no atomics" in found.fact


def test_a_table_in_reach():
    found = look_at_reach("target", "GPU 0", report(look_ns=1400), "")
    assert found.state == "ok" and "1400 ns" in found.fact


def died(said: bytes, errors: bytes) -> CompletedProcess[bytes]:
    return CompletedProcess([], -6, said, errors)


def test_a_trial_that_ends_its_process():
    """ROCm ends a process whose kernel uses an address that the GPU does not have."""
    fault = b"Memory access fault by GPU node-2 on address 0x7f10. Reason: Unknown."
    stack = b'\nFatal Python error: Aborted\n  File "pages.py", line 90 in register\n'
    said = b"a library\ntrying the speculation table\n"
    assert (
        last_words(died(said, fault + stack)) == f"{fault.decode()}, trying the speculation table"
    )
    said += b"trying the draft's attention\n"
    assert last_words(died(said, b"")) == "exit status -6, trying the draft's attention"
    assert last_words(died(b"", b"a\nRuntimeError: no GPU\n")) == "RuntimeError: no GPU"


class Deaf(SDPAAttention):
    """Computes nothing."""

    def tree_plan(self, batch, branches, steps):
        plan = super().tree_plan(batch, branches, steps)
        right = plan.attend
        plan.attend = lambda *inputs: torch.zeros_like(right(*inputs))
        return plan


@pytest.mark.parametrize("all_backends, count", [(False, 1), (True, 2)])
def test_as_a_start_does_or_all(all_backends, count):
    trial = Trial(HEADS, ("sdpa", "sdpa"), all_backends)
    assert len(try_cpu(trial).backends) == count


def test_backends_are_really_tried(monkeypatch):
    (right,) = try_cpu(Trial(HEADS, ("sdpa",))).backends
    assert right.fault is None and right.first_s > 0 and right.again_s > 0

    from vllm_ssd.draft.attention import self_test

    monkeypatch.setattr(self_test, "load_backend", lambda _: Deaf)
    (wrong,) = try_cpu(Trial(HEADS, ("sdpa",))).backends
    assert "is wrong" in wrong.fault
