"""An engine gets the KV of prompts from elsewhere, through vLLM's own connectors, and its draft
needs nothing of that."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.running import counters
from tests.support.greedy_texts import tiny_answers
from tests.support.harness import PATIENT, SSD, engine, greedy, own_run_dir, texts
from vllm_ssd.tools.port import held_port

BLOCK = 32  # tokens, the fewest on CPUs
K, ROUNDS = 3, 10
TOKENS = 1 + ROUNDS * (K + 1)  # of an answer
OPTIONS = {
    "block_size": BLOCK,
    "max_model_len": 256,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}
# No two begin alike: nothing comes from the prefix cache of the engine itself.
LENGTHS = [40, 75, 138]
_CHANCE = random.Random(1)
PROMPTS = [
    {"prompt_token_ids": [_CHANCE.randrange(400) for _ in range(length)]} for length in LENGTHS
]
SPOILT = {"prompt_token_ids": [_CHANCE.randrange(400) for _ in range(100)]}


def connector(name: str, role: str, **extra: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


def with_drafts(draft: Path) -> dict[str, Any]:
    speculation = {**SSD, "k": K, "f": 2, "model": str(draft), "max_wait_ms": 20000}
    return {**OPTIONS, **PATIENT, "speculative_config": speculation}


def settings(max_tokens: int = TOKENS, **params: Any) -> Any:
    """params: of the connector, for its part in a request."""
    extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
    return greedy(max_tokens, ignore_eos=True, detokenize=False, **extra)


def answers(llm: Any, prompts: Sequence[Any], wanted: Any = None) -> list[Any]:
    """wanted: settings of all, or of each."""
    found: list[Any] = llm.generate(prompts, wanted or settings(), use_tqdm=False)
    return found


def check_loaded(llm: Any, expected: int) -> None:
    """expected: tokens of prompts whose KV the engine was to get from elsewhere."""
    (loaded,) = [m for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits"]
    assert loaded.value == expected


def check_drafts() -> None:
    """The draft has read the prompts by itself, and was in time now and then. It equals its target:
    every round has accepted k draft tokens, as it does without a connector."""
    counted = counters(own_run_dir())
    # The last token of a prompt may come with what follows it.
    assert counted["prefill"] >= sum(LENGTHS) - len(LENGTHS)
    assert counted["hits"] > 0
    assert counted["accepted"] == [0] * K + [ROUNDS * len(PROMPTS)]


def zero(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: kv.zero_() for name, kv in load_file(file).items()}, file)


def test_through_files(tiny, tmp_path):
    """Of prompts that the draft has not seen, and the engine has forgotten: it goes on from what is
    in the files. Of a prompt whose files have other contents it says something else."""
    kv = connector("ExampleConnector", "kv_both", shared_storage_path=str(tmp_path))
    with engine(str(tiny), kv_transfer_config=kv, **with_drafts(tiny)) as llm:
        undrafted = greedy(1, detokenize=False, extra_args={"ssd": 0})
        answers(llm, PROMPTS, undrafted)
        others = set(tmp_path.iterdir())
        answers(llm, [SPOILT], undrafted)
        (of_spoilt,) = set(tmp_path.iterdir()) - others
        for file in of_spoilt.iterdir():
            zero(file)
        assert counters(own_run_dir())["prefill"] == 0
        assert llm.reset_prefix_cache()

        outputs = answers(llm, PROMPTS)
        plain = tiny_answers(
            tiny, [each["prompt_token_ids"] for each in (*PROMPTS, SPOILT)], TOKENS
        )
        *expected, of_spoilt = [(choice.tokens, choice.finish) for choice in plain]
        assert texts(outputs) == expected
        # Whole blocks of all tokens but the last one, which the engine has to compute.
        blocks = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
        assert [output.num_cached_tokens for output in outputs] == blocks
        check_loaded(llm, sum(blocks))
        check_drafts()
        assert texts(answers(llm, [SPOILT])) != [of_spoilt]


def test_over_nixl(tiny, monkeypatch):
    """From one engine's memory to the other's, while that one may do something else."""
    pytest.importorskip("nixl", reason="nixl is not among the tools that make setup installs")
    drafts = with_drafts(tiny)
    holders = []

    def start(role: str, **options: Any) -> Any:
        port, holder = held_port()
        holders.append(holder)
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        kv = connector("NixlConnector", role)
        return engine(str(tiny), kv_transfer_config=kv, **options)

    with start("kv_producer", **OPTIONS) as prefill, start("kv_consumer", **drafts) as llm:
        read = answers(prefill, PROMPTS, settings(1, do_remote_decode=True))
        outputs = answers(llm, PROMPTS, [settings(**one.kv_transfer_params) for one in read])
        assert texts(outputs) == texts(answers(prefill, PROMPTS))
        check_loaded(llm, sum(LENGTHS))
        check_drafts()
