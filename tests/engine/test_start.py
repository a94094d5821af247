"""Starts that go wrong: a sentence and an exit status, or no drafts if they are not required."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.engine.starts import make_start

# A command that begins so has 64 MB of shared memory.
SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && "$@"', "-")


@pytest.fixture
def start(target, tmp_path):
    return make_start(tmp_path, "tests.engine.conftest", target)


@pytest.fixture
def damaged(draft, tmp_path):
    """A draft whose weights end in the middle."""
    folder = tmp_path / "damaged"
    shutil.copytree(draft, folder)
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.truncate(10**6)
    return str(folder)


def test_a_damaged_draft(start, damaged):
    said, status = start(model=damaged)
    assert status != 0 and "served:" not in said, said
    assert "SSD: the draft could not be started: SafetensorError: " in said


def test_a_damaged_draft_that_is_not_required(start, damaged):
    said, status = start(model=damaged, required=False)
    assert status == 0 and "served:" in said, said
    assert "SSD: the draft could not be started: SafetensorError: " in said
    assert "serving begins without drafts" in said


TOO_SMALL = {"draft_sample_method": "probabilistic", "draft_top_m": 128, "k": 16, "f": 30}


@pytest.mark.parametrize(
    "options, said_by",
    [({}, "Insufficient space in /dev/shm"), (TOO_SMALL, "no room for the speculation table (")],
    ids=["vLLM", "table"],
)
def test_a_container_with_little_shared_memory(start, draft, options, said_by):
    """64 MB is what containers have if nobody says otherwise: too little for vLLM itself, and for
    the table of many branches, which comes first."""
    if subprocess.run([*SMALL, "true"], capture_output=True).returncode != 0:
        pytest.skip("only root can have a /dev/shm of its own")
    said, status = start(*SMALL, model=draft, **options)
    assert status != 0 and "served:" not in said, said
    assert said_by in said and "--shm-size" in said, said
