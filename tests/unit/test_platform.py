"""How the cores of a CPU machine are divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.platform import parse_cores, split_cores


@pytest.mark.parametrize(
    ("text", "cores"), [("0", [0]), ("2-4,7", [2, 3, 4, 7]), (" 1 , 1-2", [1, 2])]
)
def test_core_lists(text, cores):
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1;2", "0x1"])
def test_bad_core_lists_get_a_sentence(text):
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
