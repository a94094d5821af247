"""Stand-ins compute what the small model computes; drafts what it computes without some layers.
vLLM loads their folders, which have no weights, like checkpoints that have them."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from benchmarks.standin import ensure_standin, environment, head, write_standin
from benchmarks.standin.build import ensure_draft
from benchmarks.standin.gguf_llama import convert
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
    config = LlamaConfig(
        **shape,
        rms_norm_eps=0.05,
        rope_parameters=rotary,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [SMALL, Shape(32, 3, 8, 2, 8, 48), Shape(120, 7, 15, 5, 16, 200)])
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


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """Write `model` as llama.cpp would, with a byte-level tokenizer of 64 tokens."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SMALL.layers)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SMALL.layers)
    writer.add_context_length(128)
    writer.add_embedding_length(SMALL.hidden)
    writer.add_feed_forward_length(SMALL.intermediate)
    writer.add_head_count(SMALL.heads)
    writer.add_head_count_kv(SMALL.kv_heads)
    writer.add_rope_dimension_count(SMALL.head_dim)
    writer.add_rope_freq_base(100.0)
    writer.add_layer_norm_rms_eps(0.05)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"helo,024ĠĊ", "he", "ll", "20"]
    tokens += [f"<unused{i}>" for i in range(64 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 61)
    writer.add_token_merges(["h e", "l l", "2 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, parameter in model.named_parameters():
        data: np.ndarray = parameter.detach().numpy()
        if "q_proj" in name or "k_proj" in name:
            # llama.cpp's order of rows: a head's dimensions p and p + d/2 side by side.
            order = torch.arange(len(data)).view(-1, 2, SMALL.head_dim // 2).mT.flatten()
            data = data[order.numpy()]
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_becomes_the_same_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", small_model())
    convert(tmp_path / "model.gguf", tmp_path)
    torch.testing.assert_close(logits(tmp_path), logits(small_model()))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("<|im_start|>hello, 2024\n<|im_end|>")
    tokens = "<|im_start|> he ll o , Ġ 2 0 2 4 Ċ <|im_end|>"
    assert tokenizer.convert_ids_to_tokens(ids) == tokens.split()


def engine(model: Path, **further: Any) -> VllmConfig:
    """Return the config of a small engine."""
    general = {"skip_tokenizer_init": True, "max_model_len": 64, "enforce_eager": True}
    return EngineArgs(
        model=str(model), dtype="float32", **general, **further
    ).create_engine_config()


def made(config: VllmConfig, model_config: ModelConfig, load_config: LoadConfig) -> torch.nn.Module:
    """Return a model of an engine, loaded but not yet packed for a CPU."""
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


@pytest.mark.parametrize(("shape", "drop"), [(WIDER, ()), ("32,2,4,2,8,48", (1,))])
def test_folder_without_weights_is_the_same_model(
    models: Path, shape: str, drop: tuple[int, ...]
) -> None:
    def loaded(model: Path, load_format: str) -> dict[str, torch.Tensor]:
        config = engine(model, load_format=load_format)
        return dict(made(config, config.model_config, config.load_config).named_parameters())

    folder, whole = ensure_standin(models, shape, "float32", drop), models / "whole"
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.safetensors"))
    whole.mkdir()
    write_standin(models / "smollm2", parse_shape(shape), whole, drop)
    found, expected = loaded(folder, LOAD_FORMAT), loaded(whole, "auto")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_head_without_weights(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes it for a head of EAGLE-3. Its output layer is its own, in its own vocabulary."""
    monkeypatch.setattr(head, "_VOCABULARY", 16)
    target = ensure_standin(models, WIDER, "float32")
    speculation = {"method": "eagle3", "model": str(head.write_head(target, models))}
    speculation |= {"num_speculative_tokens": 3, **head.head_options(2.5)}
    config = engine(target, load_format=LOAD_FORMAT, speculative_config=speculation)
    told = config.speculative_config
    assert told.synthetic_acceptance_rates == [1.0, 0.5, 0.0], "and the target's own token: 2.5"
    model = made(config, told.draft_model_config, told.draft_load_config)
    assert model.has_own_lm_head and model.lm_head.org_vocab_size == 16
    assert all(weight.isfinite().all() for weight in model.state_dict().values())


def test_processes_find_the_plugin() -> None:
    paths = environment()["PYTHONPATH"].split(os.pathsep)
    found = importlib.metadata.distributions(name="vllm-standin", path=paths)
    (entry_point,) = [point for each in found for point in each.entry_points]
    assert entry_point.group == "vllm.general_plugins" and entry_point.load() is register
