"""What becomes of the target's text where the table reports distributions that drafts were not
sampled from: what the target can see of them is in order, so it takes them for what they say."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import rejection_sample

from tests.support.chi_square import chance_of
from vllm_ssd.table import SpeculationTable, TableShape, make_stamp
from vllm_ssd.table.draft_probs import pack
from vllm_ssd.table.predictions import PredictionReader, PredictionWriter
from vllm_ssd.worker.dense_probs import dense

SLOTS, VOCAB, LISTED = 4096, 6, 4
STAMP = make_stamp(1, 0)
# Of the target, with the last token cut off by its top-k; and of the draft, over the listed tokens.
TARGET = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1, 0.0])
DRAFT = torch.tensor([0.1, 0.2, 0.3, 0.4])


# Token 3 hardly ever.
RARE = torch.tensor([0.999, 0.0005, 0.0004, 0.0001])


@pytest.fixture(autouse=True)
def vllms_kernels_for_cpus():
    torch.manual_seed(5)
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def first_tokens(path, drafts, reported=None, target=TARGET, temperature=1.0, kept=None):
    """int64 [SLOTS, 1]: what vLLM's rejection sampler makes of one draft for each slot. drafts:
    int64 [SLOTS]; reported: probabilities of tokens 0..LISTED-1, None = drafts are certain.
    kept: bool [SLOTS], which drafts vLLM verifies; None = all."""
    top_m = 0 if reported is None else LISTED
    table = SpeculationTable.create(path, TableShape(SLOTS, 1, 1, tail=16, top_m=top_m))
    writer, reader = PredictionWriter(table), PredictionReader(table, VOCAB)
    entries = [] if reported is None else pack(torch.arange(LISTED), reported).numpy()[None]
    found = []
    for slot, draft in enumerate(drafts.tolist()):
        writer.publish(slot, STAMP, [0], [0])
        writer.extend(slot, STAMP, [draft], entries, torch.nan)
        found.append(reader.find(slot, STAMP, 0, 0))
        assert found[-1].tokens == [draft], "the target has seen that something is wrong"
    draft_probs = None
    if reported is not None:
        rows = torch.stack([torch.from_numpy(result.draft_probs) for result in found])
        draft_probs = dense(rows, VOCAB).view(SLOTS, VOCAB)
    greedy = temperature == 0
    settings = SimpleNamespace(
        all_greedy=greedy,
        all_random=not greedy,
        temperature=torch.full((SLOTS,), temperature),
        generators={},
    )
    logits = target.log().repeat(SLOTS, 1)
    kept = torch.ones(SLOTS, dtype=torch.bool) if kept is None else kept
    if draft_probs is not None:
        draft_probs = draft_probs[kept]
    out = rejection_sample(
        drafts[kept].int(),
        kept.int().tolist(),
        1,
        kept.cumsum(0).int(),
        draft_probs,
        logits[kept],
        sampled(target).unsqueeze(1),  # where no draft is left, the target samples
        settings,
    )
    return out[:, :1].long()


def sampled(probabilities):
    return torch.multinomial(probabilities, SLOTS, replacement=True)


def test_what_drafts_were_sampled_from_keeps_the_distribution(tmp_path):
    texts = first_tokens(tmp_path / "t", sampled(DRAFT), DRAFT)
    assert chance_of(texts, VOCAB, TARGET) > 1e-3


def test_another_temperatures_probabilities_do_not(tmp_path):
    reported = (DRAFT.log() / 0.5).softmax(-1)
    texts = first_tokens(tmp_path / "t", sampled(DRAFT), reported)
    assert chance_of(texts, VOCAB, TARGET) < 1e-9


def test_whoever_writes_the_table_can_choose_among_what_the_target_samples(tmp_path):
    drafts = torch.full((SLOTS,), 3)
    assert (first_tokens(tmp_path / "t", drafts, RARE) == 3).all()


def test_but_nothing_that_the_target_does_not_sample(tmp_path):
    target = TARGET.roll(-2)
    assert target[3] == 0
    texts = first_tokens(tmp_path / "t", torch.full((SLOTS,), 3), RARE, target)
    assert not (texts == 3).any()


@pytest.mark.parametrize("drafts", [0, 3, 5])
def test_certain_drafts_keep_it_whichever_they_are(tmp_path, drafts):
    texts = first_tokens(tmp_path / "t", torch.full((SLOTS,), drafts))
    assert chance_of(texts, VOCAB, TARGET) > 1e-3


def test_greedy_text_is_the_targets_whatever_is_reported(tmp_path):
    drafts = torch.full((SLOTS,), 3)
    texts = first_tokens(tmp_path / "t", drafts, RARE, temperature=0.0)
    assert (texts == TARGET.argmax()).all()


# What a grammar refuses, of which the draft does not know, and what it leaves of the target.
REFUSED = 2
RESTRICTED = torch.tensor([0.3, 0.25, 0.0, 0.15, 0.1, 0.0])


def test_drafts_dropped_by_their_value_keep_it_if_they_are_certain_only(tmp_path):
    """Those that are left were not drawn from what is reported, but from that without what is
    dropped."""
    exact = RESTRICTED / RESTRICTED.sum()
    drafts = sampled(DRAFT)
    kept = drafts != REFUSED
    texts = first_tokens(tmp_path / "a", drafts, DRAFT, exact, kept=kept)
    assert chance_of(texts, VOCAB, exact) < 1e-9
    texts = first_tokens(tmp_path / "b", drafts, None, exact, kept=kept)
    assert chance_of(texts, VOCAB, exact) > 1e-3


def test_drafts_left_out_by_how_likely_they_are_do_not_keep_it(tmp_path):
    """So what is verified may follow from where a draft comes from, and never from which it is."""
    drafts = sampled(DRAFT)
    texts = first_tokens(tmp_path / "a", drafts, DRAFT, kept=DRAFT[drafts] > 0.25)
    assert chance_of(texts, VOCAB, TARGET) < 1e-9
    kept = torch.arange(SLOTS) % 3 > 0
    texts = first_tokens(tmp_path / "b", drafts, DRAFT, kept=kept)
    assert chance_of(texts, VOCAB, TARGET) > 1e-3
