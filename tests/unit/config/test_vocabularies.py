"""Token ids must mean the same to target and draft, as far as both have them."""

import pytest
from vllm.config import ModelConfig

from tests.support.model_folders import WORDS, write_model
from tests.support.sentences import one_sentence
from vllm_ssd.config.draft_checks import check_vocabulary

OTHERS = ["x" + word for word in WORDS]
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
        (
            {},
            {"words": [*WORDS[:7], "w8", "w7", *WORDS[9:]]},
            {},
            "id 7 is 'w7' to the target and 'w8' to the draft",
        ),
        ({}, {"words": WORDS[:50], "vocab_size": 50}, {}, "go up to id 59"),
    ],
)
def test_vocabularies_that_do_not(compare, target, draft, options, said):
    with pytest.raises(ValueError) as error:
        compare(target, draft, **options)
    assert said in one_sentence(error)


def test_vocabularies_are_checked_for_every_config(refusal, tmp_path):
    assert "have different vocabularies" in refusal(model=write_model(tmp_path, words=OTHERS))
