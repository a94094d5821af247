"""A draft service under a name that another one has. All other starts are in test_deaths.py."""

import pytest

from tests.support.gpu_hosts import engine, parallel
from vllm_ssd.service.launch import DraftLauncher
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.service.placement import DraftDevice
from vllm_ssd.table import TableOwner, TableShape, rundir
from vllm_ssd.table.draft_names import DraftName, publish


def test_a_service_that_has_this_name_already():
    """It is the user's; this one leaves nothing."""
    other = OwnFiles(TableShape(1, 2, 3), TableOwner(draft_server="drafts"))
    publish(other.run_dir, DraftName("drafts", None))
    launcher = DraftLauncher(engine(parallel(1)), DraftName("drafts", None), DraftDevice())
    with pytest.raises(ValueError, match=f"a draft server 'drafts' already, in {other.run_dir}"):
        launcher.start()
    launcher.stop()
    assert rundir.living() == [other.run_dir]
    other.remove()
