"""Opens this user's files in folders where other users can make files, too."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(
    path: Path, flags: int = os.O_RDONLY, *, folder: bool = False, follow_links: bool = False
) -> int:
    """Open a regular file, or a folder, of this user and return the descriptor. Raises
    ``PermissionError`` if it is something else or may not be opened, and ``OSError`` if opening
    fails. The check looks at the opened descriptor. A FIFO of another user cannot make the caller
    wait."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
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
