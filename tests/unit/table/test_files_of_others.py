"""Files beside the tables that are no engine's, or another user's, or cannot be looked at."""

import os
import socket
import threading

import pytest

from vllm_ssd.service.own_table import OwnFiles, engines_of
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.tools.stats import Reading


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An engine's files, and its table, which is the only one that there is."""
    monkeypatch.setattr(rundir, "_SHARED_MEMORY", tmp_path)
    files = OwnFiles(TableShape(1, 2, 3), TableOwner("target", draft_server="one"))
    (table,) = tmp_path.iterdir()
    yield files, table
    files.remove()


def in_time(function):
    """What a function returns, which must not wait for anybody."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(function()), daemon=True)
    thread.start()
    thread.join(20)
    assert answers, "it waits, or has raised"
    return answers[0]


def test_what_others_put_beside_the_tables_is_left_alone(alone, monkeypatch, tmp_path):
    """It is not waited for, not followed and not removed."""
    mine, table = alone
    fifo, link, bound, folder = (tmp_path / f"{mine.run_dir.name}-{end}.table" for end in "@+=,")
    os.mkfifo(fifo)
    link.symlink_to(table)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the paths of sockets are short
        server.bind(bound.name)
        assert in_time(rundir.tables) == [table]
        assert [owner.model for owner in in_time(lambda: engines_of("one"))] == ["target"]
        assert [report.path for report in in_time(Reading.now).reports] == [table]
        in_time(lambda: rundir.sweep() or True)
    assert set(tmp_path.iterdir()) == {table, fifo, link, bound, folder}
    for path in (fifo, link, bound, folder):
        with pytest.raises(PermissionError, match="not a file of this user's"):
            rundir.open_own(path)


def test_files_of_another_user(alone, monkeypatch, tmp_path):
    """As if all those that are there were one's."""
    mine, table = alone
    user = os.getuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: user + 1)
        theirs = table.rename(tmp_path / f"vllm-ssd-{user + 1}-x.table")
        assert rundir.tables() == []
        with pytest.raises(PermissionError, match="not a file of this user's"):
            SpeculationTable.open(theirs)
        with pytest.raises(PermissionError):
            rundir.open_own(mine.run_dir, folder=True)
    theirs.rename(table)
    assert rundir.tables() == [table]


def test_a_table_that_cannot_be_looked_at_is_not_taken_for_abandoned(alone, monkeypatch):
    """As with too many open files."""
    mine, table = alone
    os.utime(table, (0, 0))
    hidden = mine.run_dir.rename(mine.run_dir.with_name(f"hidden-{mine.run_dir.name}"))

    def too_many(path, *_, **__):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(rundir, "open_own", too_many)
        for look in (rundir.sweep, rundir.tables):
            with pytest.raises(OSError, match="Too many"):
                look()
    assert table.exists()
    hidden.rename(mine.run_dir)
