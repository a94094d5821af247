"""How options are refused: with a sentence that says what to write instead."""

import pytest

from vllm_ssd.config.options import OPTIONS
from vllm_ssd.draft.attention.registry import TREE_BACKEND_VARIABLE


@pytest.mark.parametrize("value", [0, 17, -1, True, 7.0, "7", [7]])
def test_k(refusal, value):
    said = refusal(k=value)
    assert said == f"k must be a whole number from 1 to 16, not {value!r}"


@pytest.mark.parametrize("value", [-1, 65, True, 1.5, "3", [3, 3], {}])
def test_f(refusal, value):
    said = refusal(f=value)
    assert said == f"f must be a whole number from 0 to 64, not {value!r}"


def test_too_many_branches_or_none(refusal):
    assert "leave on_miss out or write an f above 0" in refusal(f=0, on_miss="skip")
    said = refusal(k=16, f=64)
    assert "1088 branches" in said
    assert "the most is 512" in said
    assert "lower f or k" in said


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("on_miss", "hope", '"auto", "wait" or "skip"'),
        ("max_wait_ms", 0, "a number above 0"),
        ("max_wait_ms", True, "a number above 0"),
        ("max_wait_ms", float("inf"), "a number above 0"),
        ("draft_dtype", "int8", '"float32"'),
        ("draft_max_num_batched_tokens", 8, "a whole number from 32"),
        ("draft_kv_cache_gib", -1, "a number above 0"),
        ("start_timeout_s", "10", "a number above 0"),
        ("required", 1, "true or false"),
        ("max_restarts", -1, "a whole number from 0"),
        ("max_restarts", 1.0, "a whole number from 0"),
        ("tree_backend", "eager", '"auto", "triton", "flashinfer" or "sdpa"'),
        ("draft_device", 1.5, "the index or UUID of a visible GPU"),
        ("draft_device", -1, "the index or UUID of a visible GPU"),
        ("draft_device", "one", '"2-3,6"'),
        ("draft_device", "4,", '"2-3,6"'),
        ("draft_tensor_parallel_size", 2, "1, as the draft runs on one device"),
        ("draft_sample_method", "gumbel", '"greedy" or "probabilistic"'),
        ("draft_top_m", 0, "a whole number from 1 to 128"),
        ("saguaro", 0, "a number above 0, at most 1"),
        ("saguaro", 1.5, "a number above 0, at most 1"),
        ("vocabulary", "union", '"same" or "intersection"'),
        ("rejection_sample_method", "block", '"standard" or "synthetic"'),
    ],
)
def test_bad_values(refusal, option, value, expected):
    said = refusal(**{option: value})
    assert said.startswith(f"{option} must be ")
    assert expected in said
    assert said.endswith(f"not {value!r}")


def test_sampled_drafts(make, refusal):
    assert make().top_m == 32
    assert make(draft_sample_method="greedy").top_m == 0
    config = make(draft_sample_method="probabilistic", draft_top_m=5, saguaro=0.4)
    assert (config.top_m, config.saguaro) == (5, 0.4)
    for name, value in (("draft_top_m", 8), ("saguaro", 0.5)):
        said = refusal(draft_sample_method="greedy", **{name: value})
        assert f'leave out draft_sample_method "greedy" or {name}' in said
    for f, top_m in ((0, 32), (8, 8)):
        said = refusal(
            draft_sample_method="probabilistic", saguaro=0.5, k=3, f=f, draft_top_m=top_m
        )
        assert f"nothing with f={f}: write an f above 0 and below draft_top_m" in said


def test_attention_that_needs_a_gpu(refusal, monkeypatch):
    for backend in ("flashinfer", "triton"):
        assert "needs a GPU: write 'auto' or 'sdpa'" in refusal(tree_backend=backend)
    monkeypatch.setenv(TREE_BACKEND_VARIABLE, "flashinfer")
    assert "flashinfer" in refusal()


def test_a_bad_environment(refusal, monkeypatch):
    monkeypatch.setenv(TREE_BACKEND_VARIABLE, "eager")
    said = refusal()
    assert (
        "SSD_TREE_DECODE_BACKEND must be one of auto, triton, flashinfer, sdpa, not 'eager'" in said
    )


def test_bad_value_of_an_inherited_option(refusal):
    assert refusal(revision=3).startswith("revision is 3: ")


@pytest.mark.parametrize(
    "option, meant",
    [
        ("onmiss", "on_miss"),
        ("draft-devise", "draft_device"),
        ("fan_out", "f"),
        ("draft", "model"),
        ("num_spec_tokens", "k"),
        ("K", "k"),
        ("On_Miss", "on_miss"),
        ("Fan-Out", "f"),
    ],
)
def test_unknown_option(refusal, option, meant):
    said = refusal(**{option: 1})
    assert f"no option {option.replace('-', '_')!r} (did you mean {meant!r}?)" in said
    assert ", ".join(OPTIONS) in said


@pytest.mark.parametrize(
    "option", ["run_dir", "draft_model", "engines", "target_model_config", "xyzzy"]
)
def test_internal_fields_are_no_options(refusal, option):
    assert f"no option {option!r}" in refusal(**{option: "x"})


@pytest.mark.parametrize(
    "option, value",
    [
        ("prompt_lookup_max", 3),
        ("parallel_drafting", True),
        ("use_heterogeneous_vocab", True),
        ("tensor_parallel_size", 2),
        ("enforce_eager", True),
    ],
)
def test_options_of_other_methods(refusal, option, value):
    said = refusal(**{option: value})
    assert repr(option) in said
    assert "belongs to other speculative methods" in said
    assert "leave it out" in said


@pytest.mark.parametrize(
    "schedule, word",
    [
        ([], "empty"),
        ([[1, 8]], "num_speculative_tokens_per_batch_size"),
        ([[2, 8, 3]], "start at 1"),
    ],
)
def test_schedules_that_say_nothing(refusal, schedule, word):
    assert word in refusal(num_speculative_tokens_per_batch_size=schedule)


def test_num_speculative_tokens(refusal):
    said = refusal(num_speculative_tokens=5, k=4)
    assert "num_speculative_tokens is 5 and k is 4" in said
    assert "leave num_speculative_tokens (--spec-tokens) out" in said
    said = refusal(num_speculative_tokens=17)
    assert said == "num_speculative_tokens must be a whole number from 1 to 16, not 17"


def test_max_model_len(refusal):
    assert "write at most 256" in refusal(max_model_len=257)


def test_quantization(refusal):
    said = refusal(quantization="wishful")
    assert "Unknown quantization method: wishful" in said
    assert 'name another with "model"' in said
