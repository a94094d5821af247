"""What is tried on the machine: shared memory, the draft's device, and the GPUs' reach of the
table."""

import dataclasses

import pytest
import torch

from tests.support.gpu_hosts import gpus
from tests.unit.draft.test_attention_self_test import with_outputs
from vllm_ssd.draft.attention import self_test
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.sdpa import SDPAAttention
from vllm_ssd.service.placement import DraftDevice
from vllm_ssd.table import TableShape, pages, rundir
from vllm_ssd.tools.check import machine
from vllm_ssd.tools.check.engine import DraftMemory
from vllm_ssd.tools.check.findings import GIB
from vllm_ssd.tools.check.machine import examine_draft, examine_machine, subject_without_target
from vllm_ssd.worker import device_client

CPU = torch.device("cpu")
SMALL = AttentionShape(2, 4, 2, 16, 0.25, torch.bfloat16, CPU)


@pytest.fixture
def subject():
    """A small draft on this machine's cores."""
    table = TableShape(slots=2, k=2, branches=3)
    return dataclasses.replace(subject_without_target(), table=table, attention=SMALL)


def test_everything_is_tried_and_nothing_stays(subject):
    before = set(rundir.living())
    found = list(examine_machine(subject))
    assert set(rundir.living()) == before
    assert {each.state for each in found} == {"ok"}
    facts = [each.fact for each in found]
    assert "the speculation table takes" in facts[0] and "free on CPU cores" in facts[1]
    assert "triton needs a GPU: not used" in facts
    assert facts[-1] == "sdpa: right in the self-test, is used"


def test_a_table_without_room(subject):
    large = TableShape(slots=2**20, k=16, branches=512, top_m=128)
    (found,) = examine_machine(dataclasses.replace(subject, table=large))
    assert found.state == "bad" and "--shm-size" in found.remedy


@pytest.mark.parametrize(
    "free, need, state",
    [
        (50, DraftMemory(2 * GIB, 0, 2**20, 40 * GIB, limited=True), "ok"),
        (50, DraftMemory(2 * GIB, 0, 2**20, 40 * GIB, limited=False), "note"),
        (50, DraftMemory(2 * GIB, 9 * GIB, 2**20, 40 * GIB, limited=True), "note"),
        (50, DraftMemory(0, 0, 2**20, 60 * GIB, limited=True), "note"),
        (2, DraftMemory(2 * GIB, 0, 2**20, 40 * GIB, limited=True), "bad"),
        (1, DraftMemory(2 * GIB, 0, 2**20, 40 * GIB, limited=True), "bad"),
    ],
)
def test_weights_and_kv_cache_must_fit(free, need, state):
    found = need.judge(free * GIB)
    assert found.state == state and bool(found.remedy) == (state != "ok")


@pytest.fixture
def deaf(monkeypatch):
    """Makes the backend "triton" one that computes nothing."""
    backends = {"triton": with_outputs(torch.zeros_like), "sdpa": SDPAAttention}
    monkeypatch.setattr(self_test, "load_backend", backends.get)


def test_the_first_sound_backend_is_used(subject, deaf):
    subject = dataclasses.replace(subject, backends=("triton", "sdpa"))
    *_, wrong, right = examine_draft(subject, CPU)
    assert wrong.state == "note" and "triton is wrong" in wrong.fact
    assert "if another one is right" in wrong.remedy
    assert right.state == "ok" and right.fact.startswith("sdpa: right")


def test_a_chosen_backend_that_is_wrong_is_bad(subject, deaf):
    subject = dataclasses.replace(subject, backends=("triton",))
    *_, found = examine_draft(subject, CPU)
    assert found.state == "bad" and "sdpa" in found.remedy


def test_one_gpu_is_too_few(monkeypatch):
    monkeypatch.setattr(machine, "current_platform", gpus(1))
    with pytest.raises(ValueError, match="its draft needs 1 more"):
        subject_without_target()


@pytest.fixture
def on_gpus(monkeypatch):
    """Tries a draft on one of three GPUs, which are this machine's CPU; the findings by name."""
    monkeypatch.setattr(machine, "current_platform", gpus(3))
    monkeypatch.setattr(machine.torch, "device", lambda *_: CPU)
    monkeypatch.setattr(machine.torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(pages, "register", lambda *_: None)
    monkeypatch.setattr(device_client, "measure_look_ns", lambda *_: 5)

    def find(subject, gpu):
        device = DraftDevice(gpu=gpu)
        found = examine_machine(dataclasses.replace(subject, device=device))
        return {each.name: each for each in found}

    return find


@pytest.mark.parametrize("gpu", [0, 2])
def test_both_gpus_reach_the_table(subject, on_gpus, capsys, monkeypatch, gpu):
    """The user reads before each how long it may take."""
    monkeypatch.setattr(SDPAAttention, "graphs", True)
    found = on_gpus(subject, gpu)
    assert found["draft's device"].fact.endswith(f"are free on GPU {gpu}")
    assert found["draft's table"].fact == f"GPU {gpu} reads it in 5 ns and can write to it"
    assert found["target's table"].fact.startswith("GPU 0 reads it")
    assert capsys.readouterr().err.count("minutes to compile kernels") == 2


@pytest.mark.parametrize("graphs", [True, False])
def test_a_table_out_of_reach(subject, on_gpus, monkeypatch, graphs):
    """The target needs it; the draft needs it if it publishes from the GPU."""

    def refuse(table, device):
        raise OSError("no atomics")

    monkeypatch.setattr(pages, "register", refuse)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (2**23, 2**23))
    monkeypatch.setattr(SDPAAttention, "graphs", graphs)
    found = on_gpus(subject, 1)
    assert ("draft's table" in found) == graphs
    for each in (found["target's table"], found.get("draft's table", found["target's table"])):
        assert each.state == "bad" and each.remedy
        assert "cannot reach it (no atomics; limit of locked memory: 8.0 MiB)" in each.fact


def test_a_gpu_that_cannot_be_used(subject, on_gpus, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA-capable device(s) is/are busy\nand a stack")

    monkeypatch.setattr(machine.torch.cuda, "set_device", fail)
    found = on_gpus(subject, 1)
    for name in ("draft's device", "target's device"):
        assert found[name].state == "bad" and "is/are busy)" in found[name].fact


def test_a_device_without_a_number_is_not_tried(subject, on_gpus):
    found = on_gpus(subject, "MIG-0a1b")
    assert found["draft's device"].fact == "GPU MIG-0a1b has no number: it is not tried here"
    assert "attention" not in found and found["target's table"].state == "ok"
