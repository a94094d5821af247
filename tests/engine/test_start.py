"""Starts that go wrong: a sentence and an exit status, or no drafts if they are not required."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.starts import make_start

# A command that begins so has 64 MB of shared memory.
SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && "$@"', "-")
TOO_MANY = {"draft_sample_method": "probabilistic", "draft_top_m": 128, "k": 16, "f": 30}


@pytest.fixture(scope="module")
def damaged(spoken_pair, tmp_path_factory):
    """A draft whose weights end in the middle."""
    folder = tmp_path_factory.mktemp("damaged") / "draft"
    shutil.copytree(spoken_pair[1], folder)
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.truncate(10**6)
    return str(folder)


@pytest.fixture(scope="module")
def starts(spoken_pair, damaged, tmp_path_factory):
    """All of them: what each says, once it has ended. Two at a time, as a start keeps one core
    busy."""
    target, draft = spoken_pair
    start = make_start(tmp_path_factory.mktemp("start"), "tests.engine.conftest", target)
    many = {**TOO_MANY, "model": draft}
    with ThreadPoolExecutor(2) as pool:
        yield {
            "damaged": pool.submit(start, serves=False, model=damaged),
            "table": pool.submit(start, *SMALL, serves=False, **many),
            "not required": pool.submit(start, *SMALL, serves=True, required=False, **many),
        }


def test_a_damaged_draft(starts):
    said = starts["damaged"].result()
    assert "SSD: the draft could not be started: SafetensorError: " in said, said


needs_root = pytest.mark.skipif(
    subprocess.run([*SMALL, "true"], capture_output=True).returncode != 0,
    reason="only root can have a /dev/shm of its own",
)


@needs_root
def test_a_container_with_little_shared_memory(starts):
    """64 MB is what containers have if nobody says otherwise: too little for the table of many
    branches."""
    said = starts["table"].result()
    assert "no room for the speculation table of " in said and "--shm-size" in said, said


@needs_root
def test_drafts_that_are_not_required_and_have_no_room(starts):
    said = starts["not required"].result()
    (why,) = (line for line in said.splitlines() if "SSD: " in line and "ERROR" in line)
    assert "no room for the speculation table of " in why and "begins without drafts" in why
