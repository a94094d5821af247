"""Run directories: private, found while they live, swept once their owners are gone."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.sentences import refused
from tests.unit.conftest import close
from vllm_ssd.service.own_table import NoRoom, OwnFiles
from vllm_ssd.table import TableOwner, TableShape, rundir

HOLD = """
import sys, time
from vllm_ssd.table import rundir
path, locks = rundir.create()
rundir.new_table_path(path).write_bytes(b"x")
(path / "control.sock").touch()
print(path, flush=True)
time.sleep(600)
"""


def has_table(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return rundir.table_path(path).exists()
    return False


@pytest.fixture
def mine(make_run_dir):
    """A run directory that lives until its locks are closed, and its locks."""
    return make_run_dir()


@pytest.fixture
def owner():
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    yield process, path
    process.kill()
    process.wait()
    rundir.remove(path)


def test_a_killed_owners_files_are_swept_and_only_those(owner, mine):
    process, path = owner
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert rundir.is_alive(path) and path in rundir.living()
    rundir.sweep()
    assert path.exists() and mine[0].exists()
    process.kill()
    process.wait()
    assert not rundir.is_alive(path)
    rundir.sweep()
    assert not path.exists() and not has_table(path)
    assert mine[0].exists()


@pytest.mark.parametrize(
    "module, function, said",
    [
        (tempfile, "mkdtemp", "set TMPDIR to another one"),
        (os, "posix_fallocate", "in a container raise --shm-size"),
        (fcntl, "flock", "set TMPDIR to another one"),
    ],
)
def test_no_room_for_files(monkeypatch, tmp_path, module, function, said):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def files():
        return (
            set(rundir.living()),
            set(rundir.tables()),
            set(Path(tempfile.gettempdir()).iterdir()),
        )

    monkeypatch.setattr(rundir, "_SHARED_MEMORY", tmp_path)  # others' tables come and go
    before = files()
    with monkeypatch.context() as patched, refused("No space left", said, kind=NoRoom):
        patched.setattr(rundir, "sweep", lambda: None)  # which locks files, too
        patched.setattr(module, function, full)
        OwnFiles(TableShape(1, 2, 3), TableOwner("target"))
    assert before == files()


def test_tables_without_a_directory_are_swept(mine):
    path, locks = mine
    table = rundir.new_table_path(path)
    table.touch()
    close(locks)
    (path / "lock").unlink()
    path.rmdir()
    rundir.sweep()
    assert table.exists(), "it may have been made just now"
    os.utime(table, (0, 0))
    rundir.sweep()
    assert not table.exists()


def test_a_living_engine_with_another_temporary_folder_keeps_its_table(mine, monkeypatch):
    path, _ = mine
    table = rundir.new_table_path(path)
    table.touch()
    os.utime(table, (0, 0))
    held = rundir.hold_table(path)
    with tempfile.TemporaryDirectory(dir="/tmp") as other:  # a short path, as sockets need
        monkeypatch.setattr(tempfile, "tempdir", other)
        rundir.sweep()
        assert table.exists() and table in rundir.tables(), "vllm-ssd stats shows it, too"
        os.close(held)
        rundir.sweep()
        assert not table.exists()
        monkeypatch.undo()
    assert path.exists()


def test_foreign_links_are_not_followed(mine, tmp_path):
    path, locks = mine
    close(locks)
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


def test_an_engine_outlives_a_cleaner_of_its_files(owner):
    process, path = owner
    watched = rundir.open_own(path, folder=True)
    (path / "lock").unlink()
    rundir.sweep()
    assert rundir.is_alive(path) and path in rundir.living() and has_table(path)
    shutil.rmtree(path)
    assert rundir.is_held(watched), "it is unknown where the directory is, not whether it is held"
    process.kill()
    process.wait()
    assert not rundir.is_held(watched)
    os.close(watched)


def test_files_look_used_once_touched(mine, monkeypatch):
    """While folders of Ray's come and go."""
    path, _ = mine
    going, link = path / "ray" / "going", path / "link"
    going.mkdir(parents=True)
    link.symlink_to("nowhere")
    files = [path, path / "lock", path / "ray", path / "ray" / "socket"]
    files[-1].touch()
    for file in (*files, link):
        os.utime(file, (0, 0), follow_symlinks=False)
    before = time.time() - 1
    enter = os.scandir

    def scandir(folder):
        if Path(folder) == going:
            going.rmdir()  # after its folder was listed, and before it is entered
        return enter(folder)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        rundir.touch(path)
    assert not going.exists() and link.lstat().st_mtime > before
    assert all(min(file.stat().st_atime, file.stat().st_mtime) > before for file in files)
    os.utime(files[-1], (0, 0))
    rundir.touch(path)
    assert files[-1].stat().st_mtime == 0, "it is done for an hour"
    os.utime(path / "lock", (0, 0))
    (path / "new").touch()
    rundir.touch(path)
    assert files[-1].stat().st_mtime > before, "a new file does not make the others look used"
    rundir.touch(path / "gone")


def test_files_that_another_sweep_has_just_removed(mine, monkeypatch):
    path, locks = mine
    table = rundir.new_table_path(path)
    table.touch()
    close(locks)
    seen = Path.glob

    def others_are_faster(folder: Path, pattern: str) -> list[Path]:
        found = list(seen(folder, pattern))
        table.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "glob", others_are_faster)
    assert path not in rundir.living()
    path.mkdir()
    table.touch()
    rundir.sweep()
    assert not path.exists() and not table.exists()


@pytest.mark.parametrize("user", [0, 65534, 4294967294])
@pytest.mark.parametrize(
    "folder", ["/tmp", "/tmp/" + 11 * "a", "/tmp/" + 16 * "a", "/tmp/" + 99 * "a"]
)
def test_rays_sockets_fit_whoever_the_user_is(monkeypatch, user, folder):
    made = Path(folder)
    made.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: user)
        path, locks = rundir.create()
    close(locks)
    rundir.remove(path)
    if folder != "/tmp":
        made.rmdir()
    socket = path / "ray/session_2026-11-23_11-49-13_053613_4194303/sockets/plasma_store"
    assert len(str(socket)) <= 107
