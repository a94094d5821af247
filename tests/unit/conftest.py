"""What every unit test leaves as it was, and where it finds engines and draft services."""

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

# An example may take long on a busy machine and be right nevertheless.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A temporary folder of this process: tests beside it, also of another checkout, name their draft
# services alike. Short, as the paths of sockets are limited; what pytest keeps stays where it is.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
FOLDER = tempfile.mkdtemp(prefix="ssd-", dir="/tmp")
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER

# Or the commands, which print and do not log, would set it for the process that all tests share.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


@pytest.fixture(autouse=True)
def same_environment():
    """vLLM sets variables when a config is made (LD_PRELOAD, VLLM_*), and Ray when it starts:
    engines that are started later in this process would inherit them."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def pytest_unconfigure():
    shutil.rmtree(FOLDER, ignore_errors=True)
