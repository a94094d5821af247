"""``vllm-ssd draft``: from its flags to the config of the draft's process, and where that runs."""

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import ray

from tests.support.gpu_hosts import gpus, parallel
from tests.support.model_folders import write_model
from vllm_ssd import cli
from vllm_ssd.config import target_checks
from vllm_ssd.config.draft_server import COMMON, OF_ITS_PROCESS
from vllm_ssd.service.cores import available_cores
from vllm_ssd.service.draft_device import choose_lone_device
from vllm_ssd.tools.draft_server import command, placed, serving

LOST = "vllm-ssd draft: the draft is lost for good, see above"


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """Starts the command with these flags: what it would serve, whose drafts are lost for good at
    once, and what it says."""
    own = write_model(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    served: list[object] = []

    class Drafts:
        def __init__(self, configs, name):
            served.append((configs, name))

        def start(self):
            pass

        wait_ready = tend = stop = start

    def start(*flags: str, model: str = own):
        monkeypatch.setattr(serving, "LocalDrafts", Drafts)
        assert cli.main(["draft", model, "--name", "drafts", *flags]) == 2
        return served, capsys.readouterr().err.replace("draft_device '900' ", "")

    return start


def test_it_has_all_options_under_their_names():
    """Those of its process and those that its engines have in common."""
    commands = ArgumentParser().add_subparsers()
    command.add_command(commands)
    names = {action.dest for action in commands.choices["draft"]._actions}
    its_own = {"draft_device", "draft_dtype"}  # --device may be several, --dtype is vllm serve's
    options = {*COMMON, *OF_ITS_PROCESS} - its_own
    assert options <= names and not its_own & names
    assert {name for name in names if name.startswith("draft_")} <= options


def test_flags_are_the_options(start):
    flags = "--k 3 --f 2 --saguaro 0.5 --draft-top-m 8 --dtype float32 --max-num-seqs 5"
    flags += " --max-model-len 100 --max-restarts 0"
    (([config], name),), said = start(*flags.split())
    speculation = config.speculative_config
    assert name == "drafts" and LOST in said
    assert (speculation.k, speculation.f, speculation.top_m) == (3, 2, 8)
    assert (speculation.saguaro, speculation.max_restarts) == (0.5, 0)
    assert speculation.max_model_len == 100 and config.scheduler_config.max_num_seqs == 5
    assert str(speculation.draft_model_config.dtype) == "torch.float32"
    assert speculation.draft_device == ",".join(map(str, available_cores()))


def test_a_draft_for_each_device(start, monkeypatch):
    monkeypatch.setattr(target_checks, "available_cores", lambda: [0, 1, 2])
    ((configs, name),), _ = start("--device", "0|1-2")
    assert name == "drafts"
    assert [config.speculative_config.draft_device for config in configs] == ["0", "1-2"]


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--k x", "k must be a whole number from 1 to 16, not 'x'"),
        ("--f [1,2]", "f must be a whole number from 0 to 64, not [1, 2]"),
        ("--device 900", "must be a list of cores that this process may use"),
        ("--device 0-1|1", "--device '0-1|1' has 1 twice: name a device of its own for each"),
        ("--name a/b", "--name 'a/b' must consist of letters, digits"),
        ("--ray-labels a=b", "--ray-labels needs a Ray cluster: add --ray-address ADDRESS"),
    ],
)
def test_flags_that_will_not_do(start, flags, said):
    served, answer = start(*flags.split())
    assert not served and f"vllm-ssd draft: {said}" in answer


def test_a_model_that_cannot_draft(start, tmp_path):
    """The user of this command has written no --speculative-config."""
    alike = tmp_path / "an-eagle"
    write_model(alike)
    served, said = start(model=str(alike))
    assert not served and said.endswith("in every layer: name another MODEL\n")


def test_what_vllm_cannot_read(start, tmp_path):
    assert "(dtype: " in start("--dtype", "x")[1]
    (tmp_path / "config.json").write_text("{")
    served, said = start()
    assert not served and said.count("\n") == 1
    assert said.startswith(f"vllm-ssd draft: vLLM does not take the draft {str(tmp_path)!r} (")


@pytest.mark.parametrize(
    "flags, said",
    [
        ("127.0.0.1:1", "no Ray cluster is reached at 127.0.0.1:1"),
        ("auto --ray-labels draft", "--ray-labels 'draft' is not KEY=VALUE,KEY=VALUE"),
    ],
)
def test_a_ray_cluster_that_will_not_do(start, monkeypatch, flags, said):
    def init(address, **_):
        raise ConnectionError(f"no {address}")

    monkeypatch.setattr(ray, "init", init)
    served, answer = start("--ray-address", *flags.split())
    assert not served and f"vllm-ssd draft: {said}" in answer


@pytest.mark.parametrize("free", [True, False])
def test_a_node_that_does_not_take_the_draft(start, monkeypatch, free):
    """The actor's class, options and methods are this mock, of which one waits in vain."""
    for name in ("init", "remote", "kill", "shutdown"):
        monkeypatch.setattr(ray, name, MagicMock())
    monkeypatch.setattr(ray, "wait", lambda tasks, **_: (tasks, []) if free else ([], tasks))
    monkeypatch.setattr(ray, "get", MagicMock(side_effect=ray.exceptions.ActorDiedError))
    flags = ("--ray-address", "h:1", "--ray-labels", "a=b", "--start-timeout-s", "1e-9")
    _, said = start(*flags)
    answer = "ActorDiedError: " if free else "there was not within 1e-09 s (--start-timeout-s) a"
    assert said.startswith(f"vllm-ssd draft: {answer}") and said.count("\n") == 1


def test_one_of_several_that_is_lost_for_good(monkeypatch):
    """It stays so, and does not keep the command when the others are lost, too."""
    draft = placed._Draft(Namespace(model="m", name="n", device=None), {"num_gpus": 0}, 0, None)
    draft._ray = MagicMock(exceptions=ray.exceptions)
    tries = []

    def place():
        tries.append(1)
        raise ValueError("its node is gone")

    draft._place = place
    while draft.tend():
        assert len(tries) <= placed.RESTARTS
    assert len(tries) == placed.RESTARTS + 1 and not draft.tend()
    assert len(tries) == placed.RESTARTS + 1


def test_one_that_waits_for_a_node_does_not_keep_the_others_waiting():
    draft = placed._Draft(Namespace(model="m", name="n", ray_labels=None), {"num_gpus": 0}, 0, None)
    looks = iter([[], [], ["node"], ["serving"]])
    draft._ray = MagicMock(exceptions=ray.exceptions, wait=lambda *_, **__: (next(looks), []))
    assert [draft.tend() and draft._serving for _ in range(3)] == [False, False, True]


def test_drafts_that_ray_places_are_of_one_service(monkeypatch):
    """Two may be on one node, where each publishes the name."""
    monkeypatch.setattr(placed, "devices", lambda _: ["0", "1"])
    flags = {"ray_address": "h:1", "ray_labels": None, "name": "n", "model": "m", "device": "0|1"}
    drafts = placed.PlacedDrafts(Namespace(**flags))._drafts
    monkeypatch.setattr(serving, "common_options", lambda _: None)
    monkeypatch.setattr(serving, "choose_lone_device", lambda *_: None)
    monkeypatch.setattr(serving, "DraftLauncher", lambda config, named, device, keep: named)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))
    config.speculative_config = None
    named = {
        serving.LocalDrafts([config], "n", service=draft._args.service)._launchers[0].service
        for draft in drafts
    }
    assert len(drafts) == 2 and len(named) == 1


def test_labels_of_nodes():
    both = {"draft": "yes", "ray.io/accelerator-type": "H200"}
    assert placed.labels("draft=yes,ray.io/accelerator-type=H200") == both
    assert placed.labels(None) == {}


@pytest.mark.parametrize("name, visible", [("0", "0"), ("1", "1"), ("GPU-00001", "1")])
def test_a_gpu_of_its_own(monkeypatch, name, visible):
    """Whatever vLLM's targets would get. So its KV cache may be as large as its engines need."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_device=name), parallel_config=parallel(1)
    )
    device = choose_lone_device(config, gpus(2))
    assert device.environment["CUDA_VISIBLE_DEVICES"] == visible
    assert not device.may_share_gpu and not device.of_target
