"""``vllm-ssd draft``: from its flags to the config of the draft's process."""

from types import SimpleNamespace

import pytest

from tests.support.gpu_hosts import gpus, parallel
from tests.support.model_folders import write_model
from vllm_ssd import cli, draft_server
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
    ((config, name, key_file),), status = start(
        *flags.split(), "--max-model-len", "100", "--max-restarts=0"
    )
    speculation = config.speculative_config
    assert (status, name, key_file) == (0, "drafts", None)
    assert (speculation.k, speculation.f, speculation.top_m) == (3, [2, 1, 0, 2], 8)
    assert (speculation.saguaro, speculation.max_restarts) == (0.5, 0)
    assert speculation.max_model_len == 100 and config.scheduler_config.max_num_seqs == 5
    assert str(speculation.draft_model_config.dtype) == "torch.float32"
    assert speculation.draft_device == ",".join(map(str, available_cores()))


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--k", "x"], "k must be a whole number from 1 to 16, not 'x'"),
        (["--f", "[1,2]"], "f must be one number, or one for each accepted length"),
        (["--device", "900"], "must be a list of cores that this process may use"),
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
