"""Which GPU the draft gets where vLLM gives them out."""

import os
from types import SimpleNamespace

import pytest

from tests.support.gpu_hosts import gpus, parallel
from tests.support.sentences import refused
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.config.target_checks import check_device
from vllm_ssd.service.placement import (
    engine_index,
    gpu_environment,
    local_engines,
    own_draft_name,
    place_draft,
)
from vllm_ssd.table import is_own_draft


@pytest.mark.parametrize(
    "engines, target, count, drafts",
    [
        (1, parallel(1), 2, [1]),
        (1, parallel(2), 8, [2]),
        (2, parallel(2), 5, [4, 4]),
        (3, parallel(1), 8, [3, 3, 3]),
        (1, parallel(2, ids=[5, 6]), 3, [0]),  # the draft may leave --device-ids ...
        (1, parallel(2, ids=[7, 5, 6]), 4, [2]),  # ... but uses what they have to spare first
        (2, parallel(1, ids=[4, 6, 7, 5]), 4, [3, 3]),
        (0, parallel(4), 0, []),
    ],
)
def test_drafts_come_after_all_targets(engines, target, count, drafts):
    config = SSDConfig(engines=engines)
    check_device(config, target, gpus(count))
    places = [place_draft(None, engines, target, gpus(count), engine) for engine in range(engines)]
    assert [place.gpu for place in places] == drafts


def test_the_draft_that_engines_start_has_one_name_for_all_of_them():
    """And another one for others."""
    served = SimpleNamespace(data_parallel_rank_local=None)
    for engines in (1, 2):
        assert own_draft_name(engines, served, {}).startswith(f"own:{os.getpid()}-")
        assert own_draft_name(engines, served, {}) != own_draft_name(engines, served, {})
    ports = [
        SimpleNamespace(
            data_parallel_rank_local=1,
            data_parallel_master_ip="10.0.0.1",
            data_parallel_master_port=port,
        )
        for port in (29500, 29500, 29501)
    ]
    one, same, other = (own_draft_name(2, offline, {"k": 2, "f": 1}) for offline in ports)
    assert one == same != other and is_own_draft(one)
    assert one == own_draft_name(2, ports[0], {"f": 1, "k": 2}) != own_draft_name(2, ports[0], {})
    assert own_draft_name(1, ports[0], {}) != own_draft_name(1, ports[0], {}), "they do not meet"


def test_an_engine_that_nobody_foresaw():
    with pytest.raises(ValueError, match="lower --tensor-parallel-size"):
        place_draft(None, 1, parallel(1, engine=1), gpus(2), 1)


@pytest.mark.parametrize(
    "device, engines, engine, place",
    [
        (3, 1, 0, (3, False)),
        ("2", 1, 0, (2, False)),
        ("GPU-00002", 1, 0, (2, False)),
        ("GPU-0000", 1, 0, (0, True)),  # CUDA takes the first digits, too
        (1, 1, 0, (1, True)),
        ("GPU-00001", 1, 0, (1, True)),
        ("MIG-1-2/3", 1, 0, ("MIG-1-2/3", False)),
        ("5,4", 2, 0, (5, False)),
        ("5,4", 2, 1, (4, False)),
        ("GPU-00005,4", 2, 1, (4, False)),
        ("3,4", 2, 0, (3, True)),
        ("4", 2, 1, (4, False)),
    ],
)
def test_the_users_gpu(device, engines, engine, place):
    target = parallel(2)
    check_device(SSDConfig(draft_device=device, engines=engines), target, gpus(6))
    found = place_draft(device, engines, target, gpus(6), engine)
    assert (found.gpu, found.may_share_gpu) == place


def test_the_users_gpu_among_device_ids_and_on_rocm():
    target = parallel(1, ids=[5])
    assert place_draft(1, 1, target, gpus(2), 0).may_share_gpu
    assert not place_draft(0, 1, target, gpus(2), 0).may_share_gpu
    uuid = place_draft("GPU-beef", 1, parallel(1), gpus(2, rocm=True), 0)
    assert uuid.gpu == "GPU-beef"


@pytest.mark.parametrize(
    "engines, device, target, count, expected",
    [
        (1, None, parallel(2), 2, "uses 2 of 2 visible GPUs and its draft needs 1 more"),
        (3, None, parallel(1), 3, "uses 3 of 3 visible GPUs and its draft needs 1 more"),
        (1, None, parallel(1), 1, 'share one of the target with "draft_device":0'),
        (1, None, parallel(2, ids=[5, 4]), 2, 'with "draft_device":1'),
        (1, 3, parallel(1), 3, "draft_device 3 does not exist: choose from 0 to 2"),
        (2, "2,3", parallel(1), 3, "draft_device 3 does not exist: choose from 0 to 2"),
        (1, "GPU-7", parallel(1), 3, "draft_device GPU-7 is not the UUID of a visible"),
        (1, "0-1", parallel(1), 3, "must be the index or the UUID of a visible GPU"),
        (1, "1,2", parallel(1), 3, "names 2 GPUs and this host has 1 engine: name one"),
        (3, "0,1", parallel(1), 3, "names 2 GPUs and this host has 3 engines"),
    ],
)
def test_gpus_that_are_not_there(engines, device, target, count, expected):
    with refused(expected):
        check_device(SSDConfig(draft_device=device, engines=engines), target, gpus(count))


def test_engines_of_this_host():
    offline = SimpleNamespace(data_parallel_rank_local=1, data_parallel_size=4)
    served = SimpleNamespace(data_parallel_rank_local=None, data_parallel_size_local=2)
    assert (local_engines(offline), local_engines(served)) == (4, 2)
    assert engine_index(offline) == 1
    assert engine_index(SimpleNamespace(data_parallel_rank_local=None, data_parallel_index=3)) == 3


@pytest.mark.parametrize(
    "listed, device, name",
    [
        (None, 2, "2"),
        ("", 0, "0"),
        ("4, 6,7", 1, "6"),
        ("GPU-aa,GPU-bb", 1, "GPU-bb"),
        ("4,6", "GPU-cc", "GPU-cc"),
        ("4,6", "6", "6"),  # as Ray names it: no index
    ],
)
def test_the_draft_sees_one_gpu(monkeypatch, listed, device, name):
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    cuda, rocm = gpu_environment(device, False), gpu_environment(device, True)
    kept = [f"RAY_EXPERIMENTAL_NOSET_{of}_VISIBLE_DEVICES" for of in ("CUDA", "HIP", "ROCR")]
    assert set(cuda) == {"CUDA_VISIBLE_DEVICES", kept[0]}
    assert set(rocm) == {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", *kept}
    assert cuda["CUDA_VISIBLE_DEVICES"] == name
    assert rocm["CUDA_VISIBLE_DEVICES"] == rocm["HIP_VISIBLE_DEVICES"] == name
