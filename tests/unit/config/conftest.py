"""Options of a user's, given for a tiny target with a tiny draft."""

import pytest
from vllm.config import ModelConfig, ParallelConfig

from tests.support.sentences import refused
from vllm_ssd.config.options import make_ssd_config
from vllm_ssd.config.ssd_config import SSDConfig


@pytest.fixture
def draft(models) -> str:
    return models.draft


@pytest.fixture(scope="session")
def target(models) -> ModelConfig:
    return ModelConfig(models.target, dtype="float32")


@pytest.fixture
def make(target, draft):
    """A config for these options, with the tiny draft unless they name another."""

    def make(**options) -> SSDConfig:
        return make_ssd_config({"model": draft, **options}, target, ParallelConfig())

    return make


@pytest.fixture
def refusal(make):
    """The sentence with which these options are refused."""

    def refusal(**options) -> str:
        with refused() as error:
            make(**options)
        return str(error.value)

    return refusal
