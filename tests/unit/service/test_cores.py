"""How the cores of a CPU machine are divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import ParallelConfig

from tests.support.gpu_hosts import CPU
from tests.support.sentences import refused
from vllm_ssd.config import target_checks
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.config.target_checks import check_device
from vllm_ssd.service.cores import parse_cores
from vllm_ssd.service.draft_device import split_cores


def test_core_lists():
    for text, cores in ("0", [0]), ("2-4,7", [2, 3, 4, 7]), (" 1 , 1-2", [1, 2]):
        assert parse_cores(text) == cores
    for text in "", "a", "1-", "-1", "1;2", "0x1":
        with pytest.raises(ValueError, match="is not a list of cores: write for example"):
            parse_cores(text)


@given(st.integers(1, 64), st.integers(1, 8))
def test_every_core_has_one_user_as_long_as_there_are_enough(count, ranks):
    cores = list(range(10, 10 + count))
    split = split_cores(cores, ranks, None, None)
    assert split.target is not None
    parts = [parse_cores(part) for part in split.target.split("|")]
    assert len(parts) == ranks and all(parts)
    assert split.draft
    used = [core for part in parts for core in part] + split.draft
    assert split.shared == (len(set(used)) < len(used))
    if count > ranks:
        assert not split.shared and sorted(used) == cores


def test_the_users_choices_come_first():
    assert split_cores([0, 1, 2, 3], 1, "0", None).target == "1,2,3"
    bound = split_cores([0, 1, 2, 3], 2, None, "0|1")
    assert (bound.draft, bound.target, bound.shared) == ([2, 3], None, False)
    assert split_cores([0, 1], 1, None, "0-1").shared


def test_engines_of_one_machine_have_cores_of_their_own():
    """Every one tells vLLM of all, which takes the parts at the engine's own place."""
    one, two = (split_cores(range(8), 2, None, None, engine, 2) for engine in (0, 1))
    assert (one.draft, one.target) == ([6, 7], "0|1,2|0|1,2")
    assert (two.draft, two.target) == ([6, 7], "3|4,5|3|4,5")
    assert not one.shared and not two.shared
    for device, drafts in (("4-5", ([4, 5], [4, 5])), ("4|5", ([4], [5]))):
        chosen = [split_cores(range(6), 1, device, None, engine, 2) for engine in (0, 1)]
        assert [(s.draft, s.target, s.shared) for s in chosen] == [
            (drafts[0], "0,1|0,1", False),
            (drafts[1], "2,3|2,3", False),
        ]
    bound = [split_cores(range(6), 1, None, "0,1|2,3", engine, 2) for engine in (0, 1)]
    assert [(s.draft, s.target) for s in bound] == [([4, 5], None)] * 2
    few = [split_cores([0, 1], 1, None, None, engine, 2) for engine in (0, 1)]
    assert [(s.draft, s.target, s.shared) for s in few] == [([1], "0|0", True)] * 2


@pytest.mark.parametrize(
    "device, expected",
    [
        ("7", "choose from 0, 2, 3"),
        (7, "choose from 0, 2, 3"),
        ("0,7", "choose from 0, 2, 3"),
        ("3-2", "choose from 0, 2, 3"),
        ("GPU-00001", "is not a list of cores"),
        ("0|2", "has 2 lists of cores and this host has 1 engine"),
    ],
)
def test_cores_that_are_not_there(device, expected, monkeypatch):
    monkeypatch.setattr(target_checks, "available_cores", lambda: [0, 2, 3])
    check_device(SSDConfig(draft_device="0,2-3"), ParallelConfig(), CPU)
    with refused("draft_device ", expected):
        check_device(SSDConfig(draft_device=device), ParallelConfig(), CPU)
