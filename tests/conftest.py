"""Where the tests of a process find engines and draft services: in a temporary folder of its own,
as those beside it, also of another checkout, have some, too."""

import atexit
import os
import shutil
import tempfile

import pytest

# What pytest keeps stays where it is, and so does what torch compiles: for all of them.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-ssd")
FOLDER = tempfile.mkdtemp(prefix="ssd-", dir="/tmp")  # short, as the paths of sockets are limited
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
# After what multiprocessing does at the end, whose folder is in it.
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

# Two files run at a time, on two cores: the longest come first, lest one be left at the end, and
# of engines such as wait beside such as compute.
LONGEST = """
engine/test_features engine/test_remote_draft engine/test_restart engine/test_draft_service
engine/test_start engine/test_equal_draft engine/test_lossless engine/test_server engine/test_tune
engine/test_sampling engine/test_upstream engine/test_hub_names
service/test_loaded_draft draft/test_fused_layers worker/test_lookup_kernel
unit/test_kernels_for_amd draft/test_changing_batches draft/test_architectures
""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        name = "/".join(item.path.with_suffix("").parts[-2:])
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=rank)
