"""Where the tests of a process find engines and draft services: in a temporary folder of its own,
as those beside it, also of another checkout, have some, too."""

import atexit
import os
import shutil
import tempfile

# What pytest keeps stays where it is, and so does what torch compiles: for all of them.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-ssd")
FOLDER = tempfile.mkdtemp(prefix="ssd-", dir="/tmp")  # short, as the paths of sockets are limited
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
# After what multiprocessing does at the end, whose folder is in it.
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
