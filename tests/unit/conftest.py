"""What every unit test leaves as it was."""

import os

import pytest


@pytest.fixture(autouse=True)
def same_environment():
    """vLLM sets variables when a config is made (LD_PRELOAD, VLLM_*), and Ray when it starts:
    engines that are started later in this process would inherit them."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
