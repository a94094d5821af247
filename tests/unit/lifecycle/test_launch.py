"""How a keeper is started, and its environment."""

from dataclasses import replace

import pytest

from tests.support.gpu_hosts import engine, gpus, parallel
from tests.support.loaded_draft import tiny_spec
from vllm_ssd.lifecycle import detached, launch
from vllm_ssd.lifecycle.launch import DraftLauncher
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.lifecycle.placement import DraftDevice
from vllm_ssd.lifecycle.server_spec import ServerSpec
from vllm_ssd.protocol import TableOwner, TableShape, rundir
from vllm_ssd.protocol.draft_names import DraftName, publish


@pytest.fixture
def launcher(monkeypatch):
    """Of a draft that is never loaded: a real one's spec needs its model's config."""
    from vllm import platforms

    def make(vllm_config, run_dir, device, platform, name) -> ServerSpec:
        return replace(tiny_spec(run_dir, "sdpa", run_dir), environment=device.environment)

    monkeypatch.setattr(launch, "make_server_spec", make)
    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    device = DraftDevice([], 1, {"": "a variable that nobody can set"})
    return DraftLauncher(engine(parallel(1)), DraftName("drafts", None), device)


def test_a_keeper_is_not_led_astray_by_the_working_directory(launcher, monkeypatch, tmp_path):
    """It begins for real, and ends at what it is told."""
    (tmp_path / "psutil.py").write_text("raise SystemExit('this is no psutil')")
    monkeypatch.chdir(tmp_path)
    launcher.start()
    run_dir = launcher.run_dir
    with pytest.raises(RuntimeError, match="could not be started: OSError: "):
        launcher.wait_ready()
    launcher.stop()
    assert not run_dir.exists()


def test_paths_for_another_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = detached.absolute_paths({"PYTHONPATH": ":lib:/opt", "HF_HOME": "hf", "OTHER": "a"})
    assert found == {"PYTHONPATH": f"{tmp_path}/lib:/opt", "HF_HOME": f"{tmp_path}/hf"}


def test_a_service_that_has_this_name_already(launcher):
    """It is the user's; this one leaves nothing."""
    other = OwnFiles(TableShape(1, 2, 3), TableOwner(draft_server="drafts"))
    publish(other.run_dir, DraftName("drafts", None))
    with pytest.raises(ValueError, match=f"a draft server 'drafts' already, in {other.run_dir}"):
        launcher.start()
    launcher.stop()
    assert rundir.living() == [other.run_dir]
    other.remove()
