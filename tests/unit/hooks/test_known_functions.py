"""The functions that are replaced are those of a vLLM that ssd was made for."""

from tests.support.known_functions import changed_functions, installed


def test_all_of_this_vllm_are_known():
    assert changed_functions(installed()) == []
