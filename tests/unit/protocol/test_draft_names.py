"""Draft services are found by their names as long as they live."""

import os
import stat

import pytest

from tests.support.sentences import one_sentence
from vllm_ssd.protocol import rundir
from vllm_ssd.protocol.draft_names import DraftName, find, find_all, publish


@pytest.fixture
def start():
    """A run directory as a service has it, and what ends it without removing anything."""
    begun = []

    def start():
        run_dir, locks = rundir.create()
        begun.append((run_dir, locks))

        def kill():
            while locks:
                os.close(locks.pop())

        return run_dir, kill

    yield start
    for run_dir, locks in begun:
        rundir.remove(run_dir)
        for lock in locks:
            os.close(lock)


def test_a_name_is_found_until_its_service_is_gone(start):
    run_dir, kill = start()
    named = DraftName("one", {"k": 3, "f": 2, "model": "draft", "draft_top_m": None})
    publish(run_dir, named)
    assert find("one") == (run_dir, named)
    (file,) = [path for path in run_dir.iterdir() if "server" in path.name]
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700 and file.is_file()
    kill()
    with pytest.raises(ValueError) as error:
        find("one")
    assert "has no draft server 'one'" in one_sentence(error)


def test_a_name_that_is_taken(start):
    (first, kill), (second, _) = start(), start()
    publish(first, DraftName("one", {}))
    with pytest.raises(ValueError) as error:
        publish(second, DraftName("one", {}))
    assert f"there is a draft server 'one' already, in {first}" in one_sentence(error)
    kill()
    publish(second, DraftName("one", {}))
    assert find("one")[0] == second


def test_a_service_of_another_version_is_none(start):
    run_dir, _ = start()
    (run_dir / "draft-server.json").write_text('{"name": 5}')
    publish(start()[0], DraftName("one", {}))
    assert len(find_all("one")) == 1


def test_those_that_are_there_are_listed(start):
    for name in ("two", "dp:1", "one"):
        publish(start()[0], DraftName(name, {}))
    with pytest.raises(ValueError, match=r"\(running: (?!.*dp).*one, .*two"):
        find("three")
