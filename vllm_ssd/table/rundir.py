"""One engine's private files: a directory with its lock, socket and Ray files, and its table.

The directory is in the temporary folder, the table in shared memory. Only the owner can read them.
The table's name is the directory's and more that other users cannot guess, or they could make a
file with this name as soon as they see the directory. There are two locks: a file in the
directory, and the directory itself, because cleaners of temporary folders remove old files. The
engine core and the keeper of its draft hold both locks until both have ended, however they ended. A
process that can take the locks may remove the rest. The engine core also locks its table. Engines
with another temporary folder do not find the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vllm_ssd.log import get_logger

logger = get_logger(__name__)

NAMES = r"vllm-ssd-\d+-\w+"  # of any user's run directories, as a regular expression
_SHARED_MEMORY = Path("/dev/shm")
# Characters: the path of a unix socket has at most 107. Ray's longest path takes 68 of them below
# the run directory. The name of the run directory ends with 8 that mkdtemp chooses.
_SOCKET_PATH, _OF_RAY, _RANDOM = 107, 68, 8
TOUCH_S = 3600.0  # cleaners of temporary folders remove what is some hours or days old
# Seconds: a younger table may be new and not locked yet.
_SETTLED_S = 60.0


def base() -> Path:
    """The temporary folder, or /tmp if the paths of sockets in it would be too long."""
    preferred = Path(tempfile.gettempdir())
    run_dir = len(os.fsencode(f"{preferred}/{_prefix()}")) + _RANDOM
    return preferred if run_dir + _OF_RAY <= _SOCKET_PATH else Path("/tmp")


def _prefix() -> str:
    return f"vllm-ssd-{os.getuid()}-"


def new_table_path(run_dir: Path) -> Path:
    """A path for the table of a run directory, another one at each call."""
    return _memory(run_dir) / f"{run_dir.name}-{secrets.token_hex(8)}.table"


def table_path(run_dir: Path) -> Path:
    """The path of the table that belongs to a run directory; raises ``FileNotFoundError``."""
    memory, pattern = _memory(run_dir), f"{run_dir.name}-*.table"
    for path in memory.glob(pattern):
        if _is_own(path, stat.S_ISREG):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(memory / pattern))


def _memory(run_dir: Path) -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else run_dir.parent


def create() -> tuple[Path, list[int]]:
    """A new run directory and the file descriptors that hold its lock; raises ``OSError``."""
    made = Path(tempfile.mkdtemp(prefix=f".{_prefix()}", dir=base()))
    new = os.O_RDWR | os.O_CREAT | os.O_EXCL
    locks: list[int] = []
    try:
        for path, flags in ((made, os.O_RDONLY | os.O_NOFOLLOW), (made / "lock", new)):
            locks.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
            fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Seen by others only once locked.
        return made.rename(made.with_name(made.name[1:])), locks
    except OSError:
        for lock in locks:
            os.close(lock)
        shutil.rmtree(made, ignore_errors=True)
        raise


def open_own(path: Path, flags: int = os.O_RDONLY, *, folder: bool = False) -> int:
    """Open a regular file, or a folder, of this user and return the descriptor. Raises
    ``PermissionError`` if it is something else or may not be opened, and ``OSError`` if opening
    fails. The check looks at the opened descriptor. A FIFO of another user cannot make the caller
    wait."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    foreign = PermissionError(errno.EPERM, "it is not a file of this user's", str(path))
    try:
        opened = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise foreign from error
        raise
    about = os.fstat(opened)
    kind = stat.S_ISDIR if folder else stat.S_ISREG
    if not kind(about.st_mode) or about.st_uid != os.getuid():
        os.close(opened)
        raise foreign
    return opened


def hold_table(run_dir: Path) -> int:
    """Lock a run directory's table and return the descriptor that holds it; raises ``OSError``."""
    lock = open_own(table_path(run_dir), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # ``is_held`` has it for microseconds
    return lock


def is_held(watched: int) -> bool:
    """True if some process of the engine holds the directory, even if it was removed since.
    watched: its descriptor, from ``open_own``."""
    try:
        fcntl.flock(watched, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(watched, fcntl.LOCK_UN)
    return False


def is_alive(run_dir: Path) -> bool:
    """True if some process of the engine still holds the lock."""
    return _is_locked(run_dir, folder=True) or _is_locked(run_dir / "lock")


def _is_locked(path: Path, folder: bool = False) -> bool:
    """True if this is a file of this user that some process holds. Raises ``OSError`` if that
    cannot be found out, for example with too many open files: the file may be held."""
    try:
        fd = open_own(path, folder=folder)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        return is_held(fd)
    finally:
        os.close(fd)


def touch(run_dir: Path) -> None:
    """Make all files look used, so that a cleaner of temporary folders does not remove them. Call
    it now and then: it works once in ``TOUCH_S`` seconds, by the time of the lock file, which
    nothing else writes. That of the directory changes with each new file in it."""
    lock = run_dir / "lock"
    with contextlib.suppress(OSError):
        if time.time() - (lock if lock.exists() else run_dir).stat().st_mtime < TOUCH_S:
            return
    for folder, folders, files in os.walk(run_dir):  # skips folders that it cannot read
        for name in (".", *folders, *files):
            with contextlib.suppress(OSError):  # Ray's files come and go
                os.utime(os.path.join(folder, name), follow_symlinks=False)


def remove(run_dir: Path) -> None:
    """Remove the directory and its table, as far as they exist."""
    with contextlib.suppress(FileNotFoundError):
        table_path(run_dir).unlink()
    shutil.rmtree(run_dir, ignore_errors=True)


def is_run_dir(path: Path) -> bool:
    """True if this may be the run directory of an engine of this user."""
    return path.is_absolute() and path.name.startswith(_prefix()) and _is_own(path)


def living() -> list[Path]:
    """Run directories of this user's running engines."""
    return [path for path in _all() if is_alive(path)]


def tables() -> list[Path]:
    """Tables of this user's running engines, whatever temporary folders these have."""
    return sorted(table for table in _all_tables() if _is_locked(table))


def sweep() -> None:
    """Remove what engines that were killed have left behind."""
    for path in _all():
        if not is_alive(path):
            logger.info("SSD: removing what a killed engine left in %s", path)
            remove(path)
    for table in _all_tables():
        with contextlib.suppress(FileNotFoundError):  # removed by another engine that sweeps
            about = table.lstat()
            old = time.time() - about.st_mtime > _SETTLED_S
            if old and about.st_uid == os.getuid() and not _is_locked(table):
                table.unlink()


def _all_tables() -> list[Path]:
    return list(_memory(base() / _prefix()).glob(f"{_prefix()}*.table"))


def _all() -> list[Path]:
    return [path for path in base().glob(f"{_prefix()}*") if _is_own(path)]


def _is_own(path: Path, kind: Callable[[int], bool] = stat.S_ISDIR) -> bool:
    """True if this is a folder, or a file of another ``kind``, of this user."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return False  # removed by another engine that sweeps
    return kind(about.st_mode) and about.st_uid == os.getuid()
