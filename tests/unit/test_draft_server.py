"""``vllm-ssd draft``: from its flags to the config of the draft's process."""

from types import SimpleNamespace

import pytest

from tests.support.gpu_hosts import gpus, parallel
from tests.support.model_folders import write_model
from vllm_ssd import cli, draft_server
from vllm_ssd.config import target_checks
from vllm_ssd.config.draft_server import COMMON
from vllm_ssd.service import shared_launch
from vllm_ssd.service.cores import available_cores
from vllm_ssd.service.draft_device import choose_lone_device


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the command with these flags: what it would serve, and its exit status."""
    model = write_model(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(draft_server.signal, "signal", lambda *_: None)
    served: list[object] = []

    def start(*flags: str, name: str = "drafts"):
        monkeypatch.setattr(draft_server, "_serve", lambda *what: served.append(what) or 0)
        return served, cli.main(["draft", model, "--name", name, *flags])

    return start


def test_flags_are_the_options(start):
    flags = "--k 3 --f [2,1,0,2] --saguaro 0.5 --draft-top-m 8 --dtype float32 --max-num-seqs 5"
    flags += " --max-model-len 100 --max-restarts 0"
    (([config], name, key_file),), status = start(*flags.split())
    speculation = config.speculative_config
    assert (status, name, key_file) == (0, "drafts", None)
    assert (speculation.k, speculation.f, speculation.top_m) == (3, [2, 1, 0, 2], 8)
    assert (speculation.saguaro, speculation.max_restarts) == (0.5, 0)
    assert speculation.max_model_len == 100 and config.scheduler_config.max_num_seqs == 5
    assert str(speculation.draft_model_config.dtype) == "torch.float32"
    assert speculation.draft_device == ",".join(map(str, available_cores()))


def test_a_draft_for_each_device(start, monkeypatch):
    monkeypatch.setattr(target_checks, "available_cores", lambda: [0, 1, 2])
    ((configs, name, _),), status = start("--device", "0|1-2")
    assert (status, name) == (0, "drafts")
    assert [config.speculative_config.draft_device for config in configs] == ["0", "1-2"]


def test_drafts_end_together(monkeypatch, capsys, tmp_path):
    """A name that they share; one that is lost for good is no reason to end."""
    events = []

    class Launcher:
        given_up = True

        def __init__(self, config, named, device):
            self.id = config.speculative_config.draft_device
            assert (named.name, device.cores) == ("drafts", [int(self.id)])

        def __getattr__(self, event):
            return lambda: events.append(f"{event} {self.id}")

    monkeypatch.setattr(draft_server, "LOOK_S", 0.01)
    monkeypatch.setattr(draft_server.signal, "signal", lambda *_: None)
    monkeypatch.setattr(shared_launch, "SharedDraftLauncher", Launcher)
    options = dict.fromkeys(COMMON) | {"draft_model": str(tmp_path), "top_m": 0}
    configs = [
        SimpleNamespace(speculative_config=SimpleNamespace(draft_device=core, **options))
        for core in "01"
    ]
    assert draft_server._serve(configs, "drafts", None) == 2
    steps = ("start", "wait_ready", "begin_stop", "stop")
    assert events == [f"{step} {core}" for step in steps for core in "01"]
    assert "the draft is lost for good" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--k", "x"], "k must be a whole number from 1 to 16, not 'x'"),
        (["--f", "[1,2]"], "f must be one number, or one for each accepted length"),
        (["--device", "900"], "must be a list of cores that this process may use"),
        (["--device", "0-1|1"], "--device '0-1|1' has 1 twice: name a device of its own for each"),
    ],
)
def test_flags_that_will_not_do(start, capsys, flags, said):
    served, status = start(*flags)
    assert status == 2 and not served
    assert f"vllm-ssd draft: {said}" in capsys.readouterr().err.replace("draft_device '900' ", "")


def test_an_address_needs_a_key_file(start, capsys, tmp_path):
    served, status = start("--listen", "127.0.0.1:7400")
    assert status == 2 and not served
    assert "--listen and --key-file go together" in capsys.readouterr().err
    path = tmp_path / "drafts.key"
    ((_, _, key_file),), status = start("--listen", "127.0.0.1:7400", "--key-file", str(path))
    assert status == 0 and key_file == path and path.exists()


def test_an_address_is_for_one_draft(start, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(target_checks, "available_cores", lambda: [0, 1])
    path = tmp_path / "drafts.key"
    flags = ("--device", "0|1", "--listen", "127.0.0.1:7400", "--key-file", str(path))
    served, status = start(*flags)
    assert status == 2 and not served and not path.exists()
    assert "--listen is for one draft, and --device '0|1' names 2" in capsys.readouterr().err


def test_a_name_that_is_none(start, capsys):
    served, status = start(name="a/b")
    assert status == 2 and not served
    assert "--name 'a/b' has other characters than letters" in capsys.readouterr().err


@pytest.mark.parametrize("name, visible", [("1", "1"), ("GPU-00001", "1")])
def test_a_gpu_of_its_own(monkeypatch, name, visible):
    """Whatever vLLM's targets would get."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_device=name), parallel_config=parallel(1)
    )
    device = choose_lone_device(config, gpus(2))
    assert device.environment["CUDA_VISIBLE_DEVICES"] == visible
    assert not device.may_share_gpu and not device.of_target
