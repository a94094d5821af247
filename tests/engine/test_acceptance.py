"""The draft reads texts by itself. So it does not matter to it where the target's KV comes from, or
that the target has lost some: as many draft tokens are accepted as without that. (Drafts that need
the target's hidden states may fall to one token a round.) The KV of a connector is shown in
test_kv_transfer.

The draft equals its target, and a step of the target lasts until the draft is ahead. So every round
accepts k draft tokens, and one that does not is an error of ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.common.running import counters
from tests.support.greedy_texts import tiny_answers
from tests.support.harness import PATIENT, SSD, engine, greedy, own_run_dir

K, ROUNDS = 3, 12
TOKENS = 1 + ROUNDS * (K + 1)  # of an answer; the prompt's forward yields the first one
ALL = [0] * K + [ROUNDS]  # rounds that accepted 0, 1, .. k draft tokens
BLOCK, LONGEST = 32, 512  # the fewest tokens of a block on CPUs; the tiny model's longest text
TURNS = 5
_CHANCE = random.Random(1)


def words(number: int) -> list[int]:
    return [_CHANCE.randrange(400) for _ in range(number)]


# Their texts begin in all blocks of KV memory but the first, and then want more.
PROMPTS = [words(BLOCK * 4 - 20) for _ in range(4)]


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[Any]:
    options = {
        **PATIENT,
        "block_size": BLOCK,
        "max_model_len": LONGEST,
        "num_gpu_blocks_override": LONGEST // BLOCK + 1,  # vLLM keeps one for itself
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "per_request_spec_decode_metrics": "summary",
    }
    speculation = {**SSD, "k": K, "f": 1, "model": str(tiny), "max_wait_ms": 20000}
    with engine(str(tiny), speculative_config=speculation, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny) -> list[list[int]]:
    """The target's own answers to ``PROMPTS``."""
    return [choice.tokens for choice in tiny_answers(tiny, PROMPTS, TOKENS)]


def answers(llm: Any, prompts: Sequence[list[int]]) -> list[Any]:
    sampling = greedy(TOKENS, ignore_eos=True, detokenize=False)
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    found: list[Any] = llm.generate(rows, sampling, use_tqdm=False)
    return found


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def accepted(output: Any) -> list[int]:
    """The numbers of rounds that accepted 0, 1, .. k draft tokens."""
    found: list[int] = output.outputs[0].spec_decode_metrics.histogram
    return found


def test_after_a_prefix_cache_hit(llm, expected):
    for cached in (0, BLOCK * 3):
        for prompt, text in zip(PROMPTS, expected):
            (output,) = answers(llm, [prompt])
            assert output.num_cached_tokens == cached
            assert tokens(output) == text
            assert accepted(output) == ALL


def test_after_a_preemption(llm, expected):
    outputs = answers(llm, PROMPTS)
    assert [tokens(output) for output in outputs] == expected
    preemptions = [output.metrics.num_preemptions for output in outputs]
    assert sum(preemptions) > 0
    for output, often in zip(outputs, preemptions):
        # Reading a text again yields one token, as reading a prompt does. The round after it may
        # verify what is left over of the draft tokens that were not verified before.
        taken = sum(drafts * rounds for drafts, rounds in enumerate(accepted(output)))
        assert taken == output.outputs[0].spec_decode_metrics.num_draft_tokens
        assert sum(accepted(output)) <= ROUNDS + often, f"after {often} preemptions"


def test_in_each_turn_of_a_chat(llm, tiny):
    """A turn's prompt is all of the chat so far. Target and draft have that in their caches."""
    chat = words(BLOCK * 2)
    for turn in range(TURNS):
        before = counters(own_run_dir())["prefill"]
        (output,) = answers(llm, [chat])
        assert accepted(output) == ALL, f"in turn {turn + 1}"
        assert tokens(output) == tiny_answers(tiny, [chat], TOKENS)[0].tokens
        if turn:
            assert output.num_cached_tokens > len(chat) // 2
            assert counters(own_run_dir())["prefill"] - before < len(chat) // 2
        chat += tokens(output) + words(30)
