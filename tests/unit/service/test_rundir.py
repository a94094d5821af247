"""Run directories: private, found while they live, swept once their owners are gone."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_ssd.service import rundir

HOLD = """
import sys, time
from vllm_ssd.service import rundir
path, lock = rundir.create()
rundir.table_path(path).write_bytes(b"x")
(path / "control.sock").touch()
print(path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner():
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    yield process, path
    process.kill()
    process.wait()
    rundir.remove(path)


def test_a_killed_owners_files_are_swept_and_only_those(owner):
    process, path = owner
    mine, lock = rundir.create()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert rundir.is_alive(path) and path in rundir.living()
        rundir.sweep()
        assert path.exists() and mine.exists()
        process.kill()
        process.wait()
        assert not rundir.is_alive(path)
        rundir.sweep()
        assert not path.exists() and not rundir.table_path(path).exists()
        assert mine.exists()
    finally:
        os.close(lock)
        rundir.remove(mine)


def test_a_child_that_shares_the_lock_keeps_it_alive():
    path, lock = rundir.create()
    child = subprocess.Popen(["sleep", "600"], pass_fds=(lock,))
    os.close(lock)
    try:
        assert rundir.is_alive(path)
    finally:
        child.kill()
        child.wait()
    assert not rundir.is_alive(path)
    rundir.remove(path)


def test_tables_without_a_directory_are_swept():
    path, lock = rundir.create()
    table = rundir.table_path(path)
    table.touch()
    os.close(lock)
    (path / "lock").unlink()
    path.rmdir()
    rundir.sweep()
    assert table.exists(), "it may have been made just now"
    os.utime(table, (0, 0))
    rundir.sweep()
    assert not table.exists()


def test_a_living_engine_with_another_temporary_folder_keeps_its_table(monkeypatch):
    path, lock = rundir.create()
    table = rundir.table_path(path)
    table.touch()
    os.utime(table, (0, 0))
    held = rundir.hold_table(path)
    with tempfile.TemporaryDirectory(dir="/tmp") as other:  # a short path, as sockets need
        monkeypatch.setattr(tempfile, "tempdir", other)
        rundir.sweep()
        assert table.exists()
        os.close(held)
        rundir.sweep()
        assert not table.exists()
        monkeypatch.undo()
    assert path.exists()
    os.close(lock)
    rundir.remove(path)


def test_foreign_links_are_not_followed(tmp_path):
    path, lock = rundir.create()
    os.close(lock)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "keep").touch()
    link = path.with_name(path.name[:-1] + ("a" if path.name.endswith("_") else "_"))
    link.symlink_to(victim)
    try:
        rundir.sweep()
        assert (victim / "keep").exists()
        assert link not in rundir.living()
    finally:
        link.unlink()
        rundir.remove(path)
