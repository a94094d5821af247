"""Token ids must mean the same to target and draft, as far as both have them, unless the user asks
for the tokens that both have."""

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.config import ModelConfig

from tests.support.model_folders import WORDS, write_model
from tests.support.sentences import refused
from vllm_ssd.config import shared_tokens as intersection
from vllm_ssd.config.draft_checks import check_vocabulary
from vllm_ssd.config.shared_tokens import shared_tokens

OTHERS, SWAPPED = ["x" + word for word in WORDS], [*WORDS[:7], "w8", "w7", *WORDS[9:]]
IMAGES = {"special": ["<image>", "<end of image>"], "vocab_size": 62}
NO_TOKENIZER = {"skip_tokenizer_init": True}


@pytest.fixture
def compare(tmp_path):
    """Check two models' vocabularies, each given as the arguments of ``write_model``."""

    def compare(target: dict, draft: dict, **options) -> None:
        models = (
            ModelConfig(model=write_model(tmp_path / name, **how), dtype="float32", **more)
            for name, how, more in (("target", target, options), ("draft", draft, {}))
        )
        check_vocabulary(*models)

    return compare


@pytest.mark.parametrize(
    "target, draft, options",
    [
        ({}, {}, {}),
        ({"vocab_size": 80}, {"vocab_size": 60}, {}),  # padded differently
        ({"vocab_size": 60}, {"vocab_size": 80}, {}),
        ({}, {"words": None}, {}),
        ({}, {"words": OTHERS}, NO_TOKENIZER),
        ({}, {"words": ["<unk>", "<eos>", *WORDS[2:]]}, {}),  # special tokens may differ
        # and be beyond the smaller vocabulary, as a multimodal target's placeholders for images
        (IMAGES, {"vocab_size": 60}, {}),
        ({"vocab_size": 60}, IMAGES, {}),
    ],
)
def test_vocabularies_that_agree(compare, target, draft, options):
    compare(target, draft, **options)


@pytest.mark.parametrize(
    "target, draft, options, said",
    [
        ({"vocab_size": 80}, {"words": None}, {}, "provide the tokenizers"),
        ({"vocab_size": 80}, {}, NO_TOKENIZER, "different size"),
        ({}, {"words": SWAPPED}, {}, "id 7 is 'w7' to the target and 'w8' to the draft"),
        ({}, {"words": WORDS[:50], "vocab_size": 50}, {}, "go up to id 59"),
    ],
)
def test_vocabularies_that_do_not(compare, target, draft, options, said):
    with refused(said):
        compare(target, draft, **options)


# Tokens of one text in tokenizers that mark spaces and bytes in different ways.
BYTE_LEVEL = ["?", "\u0120", "\u010a", "\u0120the", "\u00c3\u00a9", "a", "\u00c3", "the", "e", "h"]
MARKED = ["?", "<0x61>", "<0xC3>", "the", "\u2581the", "\u00e9", "<0x0A>", "a", "\u2581"]
PLAIN = ["?", "e", "\n", " ", "a", "h", "\u00e9", " the"]


@pytest.mark.parametrize(
    "target, draft, expected",
    [
        # A token that the draft does not know at all is read as its unknown one, "?".
        (BYTE_LEVEL, MARKED, [0, 8, 6, 4, 5, 7, 2, 3, ~0, ~0]),
        # "the" is read as its last letter. "a" is there twice, and one of them is not shared.
        (MARKED, PLAIN, [0, ~4, ~0, ~1, 7, 6, 2, 4, 3]),
        (PLAIN, BYTE_LEVEL, [0, 8, 2, 1, 5, 9, 4, 3]),
    ],
)
def test_tokens_of_the_same_text(tmp_path, target, draft, expected):
    models = (
        ModelConfig(model=write_model(tmp_path / name, words, len(words) + 2), dtype="float32")
        for name, words in (("target", target), ("draft", draft))
    )
    assert list(shared_tokens(*models)) == [*expected, ~0, ~0]  # padding


def test_bytes_are_named_as_by_gpt_2():
    assert {byte: name for name, byte in intersection._BYTE_OF.items()} == bytes_to_unicode()


def test_an_option_asks_for_the_shared_tokens(make, refusal, models, tmp_path):
    draft = write_model(tmp_path / "one", words=[*WORDS[::-1]])
    config = make(model=draft, vocabulary="intersection")
    assert config.draft_ids == (*range(59, -1, -1), *[~0] * 4)
    assert make().draft_ids is None
    said = refusal(model=models.other, vocabulary="intersection")
    assert "has 0% of the tokens of an ordinary text" in said
    assert "of no use below 50%: name another" in said
    said = refusal(model=write_model(tmp_path / "three", words=None), vocabulary="intersection")
    assert "one cannot be loaded" in said
    assert "provide the tokenizers" in said
