"""vLLM's load format "standin": folders without weights load like checkpoints that have them."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from benchmarks.standin import ensure_standin, environment, head, write_standin
from benchmarks.standin.loader import LOAD_FORMAT, register
from benchmarks.standin.shapes import parse_shape
from tests.unit.benchmarks.test_standin import small_model

WIDER = "64,5,8,4,16,64"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models in which a tiny one takes SmolLM2's place."""
    register()
    folder = tmp_path_factory.mktemp("models")
    small_model().save_pretrained(folder / "smollm2")
    (folder / "smollm2" / "tokenizer.json").write_text("{}")
    return folder


def loaded(
    model: Path, load_format: str, dtype: str = "float32", quantization: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the parameters of a model as vLLM has loaded them, before it packs them for a CPU."""
    config = engine(model, load_format=load_format, dtype=dtype, quantization=quantization)
    return dict(made(config, config.model_config, config.load_config).named_parameters())


def engine(model: Path, **further: Any) -> VllmConfig:
    """Return the config of a small engine."""
    general = {"skip_tokenizer_init": True, "max_model_len": 64, "enforce_eager": True}
    return EngineArgs(model=str(model), **general, **further).create_engine_config()


def made(config: VllmConfig, model_config: ModelConfig, load_config: LoadConfig) -> torch.nn.Module:
    """Return a model of an engine, loaded but not packed."""
    rendezvous = Path(config.model_config.model).parent / "rendezvous"
    with (
        set_current_vllm_config(config),
        torch.inference_mode(),
        set_default_torch_dtype(model_config.dtype),
    ):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        loader = get_model_loader(load_config)
        model = loader.create_model(vllm_config=config, model_config=model_config)
        loader.load_weights(model, model_config)
    return model


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every parameter is there, and equal to the last bit."""
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(("shape", "drop"), [(WIDER, ()), ("32,2,4,2,8,48", (1,))])
def test_folder_without_weights_is_the_same_model(
    models: Path, tmp_path: Path, shape: str, drop: tuple[int, ...]
) -> None:
    folder = ensure_standin(models, shape, "float32", drop)
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.safetensors"))
    # test_standin.py compares such checkpoints with the small model.
    write_standin(models / "smollm2", parse_shape(shape), tmp_path, drop)
    assert_same(loaded(folder, LOAD_FORMAT), loaded(tmp_path, "auto"))


def test_head_without_weights(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes it for a head of EAGLE-3. Its output layer is its own, in its own vocabulary."""
    monkeypatch.setattr(head, "_VOCABULARY", 16)
    target = ensure_standin(models, WIDER, "float32")
    folder = head.write_head(target, models)
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    speculation |= head.head_options(2.5)
    config = engine(
        target, load_format=LOAD_FORMAT, dtype="float32", speculative_config=speculation
    )
    told = config.speculative_config
    assert told.synthetic_acceptance_rates == [1.0, 0.5, 0.0], "and the target's own token: 2.5"
    model = made(config, told.draft_model_config, told.draft_load_config)
    weights = model.state_dict()
    assert model.has_own_lm_head and model.lm_head.org_vocab_size == 16
    assert weights["model.layers.0.mlp.down_proj.weight"].shape == (64, 64)
    assert all(weight.isfinite().all() for weight in weights.values())
    assert weights["draft_id_to_target_id"].tolist() == [0] * 16, "each id is the target's own"


def test_processes_find_the_plugin() -> None:
    paths = environment()["PYTHONPATH"].split(os.pathsep)
    found = importlib.metadata.distributions(name="vllm-standin", path=paths)
    (entry_point,) = [point for each in found for point in each.entry_points]
    assert entry_point.group == "vllm.general_plugins"
    assert entry_point.load() is register
