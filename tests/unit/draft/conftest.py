"""A tiny random model, loaded by vLLM as a draft is, and by transformers to compare with."""

from dataclasses import replace

import pytest

from benchmarks.standin.tiny import tiny_llama
from tests.unit.draft.loop import MAX_LEN, SLOTS, VOCAB, Reference
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.spec import DraftModelSpec


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_llama(0, VOCAB, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    model.save_pretrained(folder)
    return folder, model


def load_draft(folder, run_dir, dtype="float32", **changes):
    """The checkpoint in ``folder`` as a draft that reads texts of MAX_LEN tokens."""
    engine_args = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": MAX_LEN,
        "enforce_eager": True,
        "language_model_only": True,
    }
    spec = DraftModelSpec(engine_args, ("sdpa",), VOCAB, 2**24, SLOTS, scratch=128)
    return DraftModel(replace(spec, **changes), run_dir)


@pytest.fixture(scope="session")
def draft_model(checkpoint, tmp_path_factory):
    folder, _ = checkpoint
    return load_draft(folder, tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="session")
def reference(checkpoint):
    return Reference(checkpoint[1])
