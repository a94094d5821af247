"""Where the tests of a process find engines and draft services: in a temporary folder of its own,
as those beside it, also of another checkout, have some, too."""

import os
import shutil
import tempfile
from pathlib import Path

# What pytest keeps stays where it is.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
FOLDER = tempfile.mkdtemp(prefix="ssd-", dir="/tmp")  # short, as the paths of sockets are limited
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
# What torch compiles is kept, else each process would compile it anew: a minute on a core.
COMPILED = Path(__file__).parents[1] / ".models" / "torchinductor"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))


def pytest_unconfigure() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
