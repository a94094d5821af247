"""What a draft server is told, and that it reaches it through the keeper."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import LoadConfig, ModelConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.gpu_hosts import CPU, gpus, parallel
from tests.support.model_folders import write_model
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.service.placement import DraftDevice
from vllm_ssd.service.server_spec import ServerSpec, make_server_spec


@pytest.fixture
def make(tmp_path):
    """The spec for these options, made for this device and sent as JSON."""
    target = ModelConfig(write_model(tmp_path / "target", layers=2), dtype="float32")
    draft = write_model(tmp_path / "draft", vocab_size=60)

    def make(device: DraftDevice, platform: Any, name: str = draft, **options: Any) -> ServerSpec:
        requests = options.pop("requests", 5)
        config = SSDConfig(k=2, model=name, target_model_config=target, **options)
        engine: Any = SimpleNamespace(
            speculative_config=config,
            parallel_config=parallel(1),
            scheduler_config=SimpleNamespace(max_num_seqs=requests),
            model_config=target,
            load_config=LoadConfig(load_format="dummy"),
        )
        spec = make_server_spec(engine, "/run", device, platform)
        assert msgspec.json.decode(msgspec.json.encode(spec), type=ServerSpec) == spec
        assert spec.model.engine_args["model"] == draft
        return spec

    return make


def test_the_shared_tokens_reach_the_draft(make):
    assert make(DraftDevice(), CPU).model.draft_ids is None
    found = make(DraftDevice(), CPU, vocabulary="intersection").model.draft_ids
    assert found == (*range(60), *[~0] * 4)


def test_memory_is_planned_once_for_a_group(make):
    """Not where each of its engines has a draft of its own."""
    found = [make(DraftDevice(), CPU, engines=3, share_draft=share) for share in (False, True)]
    assert [spec.model.max_requests for spec in found] == [5, 15]


@pytest.mark.parametrize(
    "device, platform, chosen_gib, expected",
    [
        (DraftDevice([0]), CPU, None, 2**30),
        (DraftDevice(gpu=0, may_share_gpu=True), gpus(1), None, 2**30),
        (DraftDevice(gpu=1), gpus(2), None, None),
        (DraftDevice(gpu=1), gpus(2), 0.5, 2**29),
    ],
)
def test_memory_that_the_draft_may_use(make, device, platform, chosen_gib, expected):
    assert make(device, platform, draft_kv_cache_gib=chosen_gib).model.kv_cache_bytes == expected


def test_vllm_takes_the_draft_of_many_engines(make):
    """GPUs of 80 GB allow 1024 requests an engine: three have more than a step's 2048 tokens."""
    arguments = make(DraftDevice([0]), CPU, requests=100_000, engines=3).model.engine_args
    assert EngineArgs(**arguments).create_engine_config().model_config.multimodal_config is None
    assert arguments["language_model_only"] is True  # it reads texts only


def test_models_are_found_from_another_working_directory(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make(DraftDevice(), CPU, "draft").model.engine_args["model"] == str(tmp_path / "draft")
