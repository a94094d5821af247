"""Token ids must mean the same to target and draft, as far as both have them."""

import pytest
from vllm.config import ModelConfig

from tests.support.model_folders import WORDS, write_model
from tests.support.sentences import one_sentence
from vllm_ssd.config.draft_checks import check_vocabulary


def model_config(folder: str, **options) -> ModelConfig:
    return ModelConfig(model=folder, dtype="float32", **options)


@pytest.fixture
def compare(tmp_path):
    """Check two models' vocabularies, each given as the arguments of ``write_model``."""

    def compare(target: dict, draft: dict, **options) -> None:
        check_vocabulary(
            model_config(write_model(tmp_path / "target", **target), **options),
            model_config(write_model(tmp_path / "draft", **draft)),
        )

    return compare


def test_vocabularies_that_agree(compare):
    compare({}, {})


def test_vocabularies_padded_differently(compare):
    compare({"vocab_size": 80}, {"vocab_size": 60})
    compare({"vocab_size": 60}, {"vocab_size": 80})


def test_draft_without_a_tokenizer(compare):
    compare({}, {"words": None})
    with pytest.raises(ValueError, match="provide the tokenizers") as error:
        compare({"vocab_size": 80}, {"words": None})
    one_sentence(error)


def test_tokenizers_that_are_not_to_be_loaded(compare):
    other = ["x" + word for word in WORDS]
    compare({}, {"words": other}, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="different size"):
        compare({"vocab_size": 80}, {}, skip_tokenizer_init=True)


def test_special_tokens_may_differ(compare):
    compare({}, {"words": ["<unk>", "<eos>", *WORDS[2:]]})


def test_a_token_that_means_something_else(compare):
    with pytest.raises(
        ValueError, match="id 7 is 'w7' to the target and 'w8' to the draft"
    ) as error:
        compare({}, {"words": [*WORDS[:7], "w8", "w7", *WORDS[9:]]})
    one_sentence(error)


def test_tokens_beyond_the_smaller_vocabulary(compare):
    with pytest.raises(ValueError, match="go up to id 59") as error:
        compare({}, {"words": WORDS[:50], "vocab_size": 50})
    one_sentence(error)


def test_special_tokens_may_be_beyond_the_smaller_vocabulary(compare):
    """As a multimodal target's placeholders for images are beyond its text draft's."""
    more = {"special": ["<image>", "<end of image>"], "vocab_size": 62}
    compare(more, {"vocab_size": 60})
    compare({"vocab_size": 60}, more)


def test_vocabularies_are_checked_for_every_config(refusal, tmp_path):
    other = write_model(tmp_path, words=["x" + word for word in WORDS])
    assert "have different vocabularies" in refusal(model=other)
