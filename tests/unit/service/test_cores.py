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


def split(*how):
    """The draft's cores, the targets', None if the user bound them, and whether they share some."""
    found = split_cores(*how)
    return found.cores, found.of_target.get("VLLM_CPU_OMP_THREADS_BIND"), bool(found.notes)


def test_core_lists():
    for text, cores in ("0", [0]), ("2-4,7", [2, 3, 4, 7]), (" 1 , 1-2", [1, 2]):
        assert parse_cores(text) == cores
    for text in "", "a", "1-", "-1", "1;2", "0x1", "3-1,0", "0-99999999999":
        with pytest.raises(ValueError, match="is not a list of cores: write for example"):
            parse_cores(text)


@given(st.integers(1, 64), st.integers(1, 8))
def test_every_core_has_one_user_as_long_as_there_are_enough(count, ranks):
    cores = list(range(10, 10 + count))
    draft, target, shared = split(cores, ranks, None, None)
    parts = [parse_cores(part) for part in target.split("|")]
    assert len(parts) == ranks and all(parts)
    assert draft
    used = [core for part in parts for core in part] + draft
    assert shared == (len(set(used)) < len(used))
    if count > ranks:
        assert not shared and sorted(used) == cores


def test_the_users_choices_come_first():
    assert split([0, 1, 2, 3], 1, "0", None) == ([0], "1,2,3", False)
    assert split([0, 1, 2, 3], 2, None, "0|1") == ([2, 3], None, False)
    assert split([0, 1], 1, None, "0-1") == ([0, 1], None, True)
    with refused("VLLM_CPU_OMP_THREADS_BIND: 'abc' is not a list of cores"):
        split([0, 1], 1, None, "abc")


def test_engines_of_one_machine_have_cores_of_their_own():
    """Every one tells vLLM of all, which takes the parts at the engine's own place."""
    one, two = (split(range(8), 2, None, None, engine, 2) for engine in (0, 1))
    assert one == ([6, 7], "0|1,2|0|1,2", False)
    assert two == ([6, 7], "3|4,5|3|4,5", False)
    for device, drafts in (("4-5", ([4, 5], [4, 5])), ("4|5", ([4], [5]))):
        chosen = [split(range(6), 1, device, None, engine, 2) for engine in (0, 1)]
        parts = "0,1|0,1", "2,3|2,3"
        assert chosen == [(own, part, False) for own, part in zip(drafts, parts)]
    bound = [split(range(6), 1, None, "0,1|2,3", engine, 2) for engine in (0, 1)]
    assert bound == [([4, 5], None, False)] * 2
    few = [split([0, 1], 1, None, None, engine, 2) for engine in (0, 1)]
    assert few == [([1], "0|0", True)] * 2


@pytest.mark.parametrize(
    "device, expected",
    [
        ("7", "choose from 0, 2, 3"),
        (7, "choose from 0, 2, 3"),
        ("0,7", "choose from 0, 2, 3"),
        ("3-2", "is not a list of cores"),
        ("GPU-00001", "is not a list of cores"),
        ("0|2", "has 2 lists of cores and this host has 1 engine"),
    ],
)
def test_cores_that_are_not_there(device, expected, monkeypatch):
    monkeypatch.setattr(target_checks, "available_cores", lambda: [0, 2, 3])
    check_device(SSDConfig(draft_device="0,2-3"), ParallelConfig(), CPU)
    with refused("draft_device ", expected):
        check_device(SSDConfig(draft_device=device), ParallelConfig(), CPU)
