"""Stand-ins compute what the small model computes; drafts what it computes without some layers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.standin.build import ensure_draft, write_standin
from benchmarks.standin.gguf_llama import convert
from benchmarks.standin.shapes import Shape

SMALL = Shape(hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48)
IDS = torch.arange(40)[None] * 7 % 64


def small_model(tied: bool = True) -> LlamaForCausalLM:
    """Make a random Llama of shape SMALL whose norms, epsilon and rotary base all matter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=SMALL.hidden,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim,
        intermediate_size=SMALL.intermediate,
        rms_norm_eps=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of one fixed text."""
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits[0]
    return result


def load(folder: Path) -> LlamaForCausalLM:
    """Load a checkpoint in float32 and insist that no weight is missing or left over."""
    loaded: Any = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    assert isinstance(model, LlamaForCausalLM)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model.eval()
    return model


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder of models in which a tiny one takes SmolLM2's place."""
    small_model().save_pretrained(tmp_path / "smollm2")
    (tmp_path / "smollm2" / "tokenizer.json").write_text("{}")
    return tmp_path


WIDER = {
    "same": SMALL,
    "more query heads": Shape(32, 3, 8, 2, 8, 48),
    "all": Shape(120, 7, 15, 5, 16, 200),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", WIDER.values(), ids=WIDER.keys())
def test_standin_has_the_small_models_logits(tmp_path: Path, shape: Shape, tied: bool) -> None:
    model = small_model(tied)
    model.save_pretrained(tmp_path / "small")
    (tmp_path / "large").mkdir()
    write_standin(tmp_path / "small", shape, tmp_path / "large")
    standin = load(tmp_path / "large")
    assert Shape.from_config(standin.config.to_dict()) == shape
    torch.testing.assert_close(logits(standin), logits(model), rtol=0, atol=1e-4)


def without_layer(model: LlamaForCausalLM, layer: int) -> LlamaForCausalLM:
    """Take one layer out of a transformers model."""
    del model.model.layers[layer]
    for index, left in enumerate(model.model.layers):
        left.self_attn.layer_idx = index
    model.config.num_hidden_layers -= 1
    return model


def test_draft_folders(models: Path) -> None:
    draft = ensure_draft(models, drop=(1,))
    assert draft == models / "draft-without-1"
    torch.testing.assert_close(logits(load(draft)), logits(without_layer(small_model(), 1)))
    assert (draft / "tokenizer.json").is_file()
    assert ensure_draft(models, drop=(0, 1)) == models / "draft-without-0-1"
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
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *"abcdefghijklmnopqrstuvwxyz0123456789.,!?ĠĊ", "he", "ll", "20"]
    tokens += [f"<unused{i}>" for i in range(64 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (64 - len(special)))
    writer.add_token_merges(["h e", "l l", "2 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
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
    out = tmp_path / "out"
    out.mkdir()
    convert(tmp_path / "model.gguf", out)
    model = load(out)
    torch.testing.assert_close(logits(model), logits(small_model()))
    assert np.float32(model.config.rms_norm_eps) == np.float32(0.05)  # GGUF holds float32

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token_id == model.config.eos_token_id == 2
    text = "<|im_start|>hello, 2024\n<|im_end|>"
    tokens = ["<|im_start|>", "he", "ll", "o", ",", "Ġ", "2", "0", "2", "4", "Ċ", "<|im_end|>"]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    # Programs that read tokenizer.json alone must see the special tokens, too.
    bare = Tokenizer.from_file(str(out / "tokenizer.json")).encode(text)
    assert bare.tokens == tokens
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi"
