"""Drafts with quantised weights draft what transformers computes from the weights these stand for,
but where rounding decides."""

import pytest

from benchmarks.standin.tiny import tiny_llama
from tests.support.quantised import COMPUTED, write_quantised
from tests.unit.draft.conftest import load_draft
from tests.unit.draft.loop import PROMPT, VOCAB, Loop, Reference
from vllm_ssd.draft.spec import DraftPolicy

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.2}


@pytest.mark.parametrize("scheme", COMPUTED)
def test_a_quantised_draft(tmp_path, scheme):
    model = tiny_llama(0, VOCAB, **SHAPE)
    folder = tmp_path / "model"
    write_quantised(model, scheme, folder)
    k, rounds = 3, 5
    reference = Reference(model)
    truth = reference.continuation(PROMPT, 1 + rounds * (k + 1))
    assert len(set(truth)) > rounds, "it says the same again and again"
    draft = load_draft(folder, tmp_path, dtype="auto")
    loop = Loop(draft, tmp_path / "t", DraftPolicy(k, 2, False, chunk=16))
    target = loop.begin("a", PROMPT, reference, truth)
    accepted = 0
    for _ in range(rounds + 1):
        loop.work()
        accepted += target.round(loop.client)
    # Where inputs are rounded to 8 bits, too, that decides often. Weights read wrong accept none.
    assert accepted > rounds / 2
