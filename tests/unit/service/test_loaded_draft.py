"""The draft leaves its server's memory and comes back, with its weights or with others."""

import weakref

import pytest
import torch

from benchmarks.standin.tiny import tiny_llama
from tests.support.loaded_draft import HEADS, TEXT, VOCAB, predicted, tiny_draft
from tests.support.sentences import refused


@pytest.fixture
def write(tmp_path):
    """Writes a checkpoint of this name; returns the token that it takes for the next of TEXT."""

    def write(name, seed, **shape):
        model = tiny_llama(seed, VOCAB, **HEADS, **shape)
        model.save_pretrained(tmp_path / name)
        with torch.inference_mode():
            return int(model(torch.tensor([TEXT])).logits[0, -1].argmax())

    return write


def test_its_memory_is_given_back_and_its_weights_may_be_others(write, tmp_path):
    """After weights that are not its own it has those that it had."""
    first, second = write("first", seed=1), write("second", seed=2)
    write("wider", seed=2, hidden_size=128)
    assert first != second
    with tiny_draft(tmp_path / "first", "sdpa") as draft:
        draft.take_weights(str(tmp_path / "first"))  # its server began asleep
        assert draft.load().startswith("loaded in ")
        assert predicted(draft) == first
        model = draft.engine.model
        held = [weakref.ref(memory) for memory in (model, *model.attention.keys)]
        held += [weakref.ref(weights) for weights in model._model.parameters()]
        del model
        draft.put_away()
        assert draft.engine is None and not any(ref() is not None for ref in held)
        for name, said in (("second", second), ("first", first)):
            draft.take_weights(str(tmp_path / name))
            draft.load()
            assert predicted(draft) == said
        for name, problem in (
            ("wider", "is of another model than the draft"),
            ("none", "cannot be loaded from"),
        ):
            with refused(problem):
                draft.take_weights(str(tmp_path / name))
            assert draft.engine is None
        draft.load()
        assert predicted(draft) == first
