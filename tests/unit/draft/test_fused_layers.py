"""Fused layers compute what vLLM's do, for the architectures that people draft with."""

from typing import Any

import pytest
import torch

from tests.support.interpreter import HERE, run_again

if not HERE:

    def test_in_the_interpreter():
        run_again(__file__)

else:
    from dataclasses import replace

    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.standin.tiny import TINY
    from tests.unit.draft.conftest import load_draft
    from tests.unit.draft.test_architectures import ARCHITECTURES
    from vllm_ssd.draft.fused.layers import FusedLayers
    from vllm_ssd.draft.fused.self_test import TOLERANCE, largest_difference
    from vllm_ssd.draft.fused.weights import read_weights
    from vllm_ssd.draft.likeliest import likeliest_in_one_pass as in_one_pass
    from vllm_ssd.draft.model import DraftModel

    VOCAB = 300

    @pytest.fixture(autouse=True)
    def weights_stay(monkeypatch):
        """vLLM keeps weights for CPUs in an order of their own only; here, in the usual one too."""
        from vllm.model_executor.layers import utils

        dispatch = utils.dispatch_cpu_unquantized_gemm
        monkeypatch.setattr(
            utils,
            "dispatch_cpu_unquantized_gemm",
            lambda layer, remove_weight: dispatch(layer, False),
        )

    def draft(tmp_path, name: str, **sizes: Any) -> DraftModel:
        """A random model with no weights alike, norms and biases neither."""
        torch.manual_seed(0)
        known = {"vocab_size": VOCAB, **TINY, **ARCHITECTURES[name], **sizes}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **known)).float()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight.normal_(1, 0.3)
                else:
                    weight.normal_(0, 0.1)
        model.save_pretrained(tmp_path / "model")
        return load_draft(tmp_path / "model", tmp_path)

    SMALL = {"hidden_size": 192, "intermediate_size": 64, "num_attention_heads": 6}
    # With products of which several programs have a part.
    SPLIT = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4}

    # The interpreter takes seconds for many tokens. Together these have all parts of layers, with
    # few tokens and with the several tiles of more.
    @pytest.mark.parametrize(
        "name, sizes, counts",
        [
            ("llama", SPLIT, (5, 130)),
            ("qwen2", SMALL, (40,)),
            ("qwen3", SPLIT, (5, 40)),
            ("granite", SMALL, (24,)),
        ],
    )
    def test_same_hidden_states(tmp_path, name, sizes, counts):
        model = draft(tmp_path, name, **sizes)
        with torch.inference_mode():
            weights = read_weights(model._model)
            fused = FusedLayers(weights, model.attention)
            theirs = model._forward, model.logits, model.attention
            assert largest_difference(fused, *theirs, counts=counts) < 1e-4
            if name != "llama":
                return
            hidden = torch.randn(20, model.hidden_size)
            for known in (VOCAB, 70):  # by all tiles of the vocabulary, and by a part of one
                logits = model.logits(hidden)[:, :known]
                probs = logits.softmax(dim=1).amax(dim=1)
                for tokens, found in (fused.likeliest(hidden, known), in_one_pass(logits)):
                    assert tokens.equal(logits.argmax(dim=1))
                    assert torch.allclose(found, probs)
            wrong = FusedLayers(replace(weights, residual_multiplier=0.2), model.attention)
            assert largest_difference(wrong, *theirs, counts=(5,)) > TOLERANCE
