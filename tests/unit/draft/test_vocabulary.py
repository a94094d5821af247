"""A draft with another vocabulary than the target's reads and proposes the target's tokens."""

from types import SimpleNamespace

import pytest
import torch

from tests.unit.draft.conftest import load_draft
from tests.unit.draft.loop import PROMPT, VOCAB, Loop, Reference
from tests.unit.draft.test_sampled_drafts import first_drafts, reported
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.vocabulary import SharedVocabulary

K = 4
SIZE = VOCAB - 20  # tokens of the target
# The target's token t is the draft's 7 t + 11. One in five is not shared, though.
READ = (torch.arange(SIZE) * 7 + 11) % VOCAB
ALONE = {t for t in range(SIZE) if t % 5 == 3}
IDS = tuple(~token if t in ALONE else token for t, token in enumerate(READ.tolist()))


class Translated:
    """The checkpoint, as it looks to those who know the target's tokens only."""

    def __init__(self, model):
        self._model = model

    def __call__(self, text):
        logits = self._model(READ[text]).logits[..., READ]
        logits[..., [*ALONE]] = float("-inf")
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def draft(checkpoint, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return load_draft(checkpoint[0], run_dir, vocab_size=SIZE, draft_ids=IDS)


@pytest.fixture(scope="module")
def translated(checkpoint):
    return Translated(checkpoint[1])


def test_tokens_there_and_back():
    words = SharedVocabulary([2, ~0, 1], torch.device("cpu"))
    # The last two are no tokens of the target.
    assert words.read(torch.tensor([0, 1, 2, 3, -1])).tolist() == [2, 0, 1, 2, 2]
    logits = words.logits(torch.tensor([[0.5, 1.5, 2.5, 9.0]]))
    assert logits.tolist() == [[2.5, float("-inf"), 1.5]]


@pytest.mark.parametrize("top_m", [0, 6])
def test_drafts_of_shared_tokens_are_accepted(tmp_path, draft, translated, top_m):
    """Before, between and after tokens that only the target has."""
    loop = Loop(draft, tmp_path / "t", DraftPolicy(K, 3, False, chunk=16, top_m=top_m))
    says = Reference(translated)
    prompt = [*PROMPT, 8, 13, 4]
    truth = says.continuation(prompt, 1 + 2 * (K + 1))
    target = loop.begin("a", prompt, says, [*truth, 13])
    accepted = []
    for _ in range(6):
        loop.work()
        accepted.append(target.round(loop.client))
    # After the prompt's own token. 13 is a bonus that the draft cannot expect.
    assert accepted == [0, K, K, 0, 0, K]
    assert [token for token in target.text[len(prompt) :] if token in ALONE] == [13]


def test_sampled_drafts_come_with_a_distribution_over_shared_tokens(tmp_path, draft, translated):
    top_m, temperature = 6, 0.7
    loop = Loop(draft, tmp_path / "t", DraftPolicy(K, 2, True, 64, top_m=top_m))
    text, found = first_drafts(loop, translated, "a", temperature)
    assert len(found.tokens) == K
    tokens = reported(translated, text, found, top_m, temperature)
    assert not set(tokens.view(-1).tolist()) & ALONE


def test_tokens_that_are_not_shared_are_not_expected_next(tmp_path, draft):
    """After the prompt, most tokens that are shared are."""
    policy = DraftPolicy(K, 40, False, chunk=16)
    loop = Loop(draft, tmp_path / "t", policy)
    loop.client.add("a", PROMPT)
    loop.work()
    slot = loop.slot_of("a").slot
    bonus = loop.table.slots["prediction"][slot, 0]["bonus"]
    assert len(set(bonus.tolist())) == policy.branches == 200
    assert not set(bonus.tolist()) & ALONE
