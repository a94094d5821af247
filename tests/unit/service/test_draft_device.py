"""The device that an engine's draft gets, and what is said of it."""

import pytest

from tests.support.gpu_hosts import CPU, engine, gpus, parallel
from vllm_ssd.service import draft_device
from vllm_ssd.service.draft_device import choose_device
from vllm_ssd.service.placement import DraftDevice


def test_sharing_needs_a_word_and_gets_one():
    assert choose_device(engine(parallel(1)), gpus(2)).gpu == 1
    own = choose_device(engine(parallel(1), draft_device=1), gpus(2))
    assert own.gpu == 1 and not own.may_share_gpu and not own.notes
    shared = engine(parallel(1), draft_device=0, draft_kv_cache_gib=2.5)
    found = choose_device(shared, gpus(2))
    assert found.gpu == 0 and found.may_share_gpu
    (note,) = found.notes
    assert "for development only" in note
    assert "its 2.5 GiB of KV cache (draft_kv_cache_gib)" in note


def test_drafts_that_share_are_warned_of_once():
    for device, warnings in ((2, 0), ("2,2", 1)):
        notes = []
        for number in range(2):
            made = engine(parallel(1, engine=number), engines=2, draft_device=device)
            found = choose_device(made, gpus(3))
            assert found.gpu == 2
            notes += found.notes
        assert len(notes) == warnings
    assert "names one GPU for the drafts of several engines" in notes[0]


@pytest.mark.parametrize("rocm", [False, True])
def test_the_drafts_process_sees_that_gpu(monkeypatch, rocm):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    found = choose_device(engine(parallel(1)), gpus(2, rocm))
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert ("HIP_VISIBLE_DEVICES" in found.environment) == rocm
    assert not found.cores


@pytest.mark.parametrize(
    "bind, cores, bound",
    [
        ("auto", [3], {"VLLM_CPU_OMP_THREADS_BIND": "0,1,2"}),
        ("nobind", [3], {"VLLM_CPU_OMP_THREADS_BIND": "0,1,2"}),
        ("0-1", [2, 3], {}),
    ],
)
def test_target_and_draft_have_cores_of_their_own(monkeypatch, bind, cores, bound):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    monkeypatch.setattr(draft_device, "available_cores", lambda: [0, 1, 2, 3])
    found = choose_device(engine(parallel(1)), CPU)
    of_draft = {"OMP_NUM_THREADS": str(len(cores))}
    assert found == DraftDevice(cores, environment=of_draft, of_target=bound)


def test_too_few_cores(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setattr(draft_device, "available_cores", lambda: [0])
    found = choose_device(engine(parallel(1), draft_device="0"), CPU)
    (note,) = found.notes
    assert found.cores == [0] and "target and draft share some, and will be slow" in note
