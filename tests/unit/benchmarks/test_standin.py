"""Stand-ins compute what the small model computes; drafts what it computes without some layers.
vLLM loads their folders, which have no weights, like checkpoints that have them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader import get_model_loader

from benchmarks.standin import ensure_standin, write_standin
from benchmarks.standin.build import ensure_draft
from benchmarks.standin.checkpoint import WEIGHTS
from benchmarks.standin.loader import LOAD_FORMAT, register
from benchmarks.standin.shapes import Shape, parse_shape

SMALL = Shape(hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48)
WIDER = "64,5,8,4,16,64"


def small_model(tied: bool = True) -> LlamaForCausalLM:
    """Make a random Llama of shape SMALL whose norms, epsilon and rotary base all matter."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 64}
    rotary = {"rope_type": "default", "rope_theta": 100.0}
    numbers = {"rms_norm_eps": 0.05, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**shape, **numbers, rope_parameters=rotary, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def logits(model: LlamaForCausalLM | Path) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of one fixed text, of a model or of a checkpoint of
    which no weight is missing or left over."""
    if isinstance(model, Path):
        told: Any = {"dtype": torch.float32, "output_loading_info": True}
        model, info = LlamaForCausalLM.from_pretrained(model, **told)
        assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(40)[None] * 7 % 64).logits[0]
    return result


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder of models in which a tiny one takes SmolLM2's place."""
    register()
    small_model().save_pretrained(tmp_path / "smollm2")
    (tmp_path / "smollm2" / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("shape", "tied"), [(Shape(32, 3, 8, 2, 8, 48), True), (Shape(120, 7, 15, 5, 16, 200), False)]
)
def test_standin_has_the_small_models_logits(tmp_path: Path, shape: Shape, tied: bool) -> None:
    model = small_model(tied)
    model.save_pretrained(tmp_path / "small")
    (tmp_path / "large").mkdir()
    write_standin(tmp_path / "small", shape, tmp_path / "large")
    assert Shape.from_config(LlamaConfig.from_pretrained(tmp_path / "large").to_dict()) == shape
    torch.testing.assert_close(logits(tmp_path / "large"), logits(model), rtol=0, atol=1e-4)


def test_a_draft_lacks_layers(models: Path) -> None:
    draft, other = ensure_draft(models, drop=(1,)), small_model()
    assert draft == models / "draft-without-1" and (draft / "tokenizer.json").is_file()
    del other.model.layers[1]
    other.model.layers[1].self_attn.layer_idx, other.config.num_hidden_layers = 1, 2
    torch.testing.assert_close(logits(draft), logits(other))
    with pytest.raises(ValueError, match=r"layers \[9\]"):
        ensure_draft(models, drop=(9,))


def test_folder_without_weights_is_the_same_model(models: Path) -> None:
    """vLLM's loader gets the tensors that a checkpoint would have."""
    folder, whole = ensure_standin(models, WIDER, "float32", (1,)), models / "whole"
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.safetensors"))
    whole.mkdir()
    write_standin(models / "smollm2", parse_shape(WIDER), whole, (1,))
    config = ModelConfig(str(folder), dtype="float32", skip_tokenizer_init=True)
    loader = get_model_loader(LoadConfig(load_format=LOAD_FORMAT))
    loader.download_model(config)
    found = dict(loader.get_all_weights(config, torch.nn.Module()))
    expected = load_file(whole / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
