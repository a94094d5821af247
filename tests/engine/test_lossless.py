"""With the option, too, texts are the target's own, token for token. In test_features.py they are
those of a real model, and in test_hub_names.py of two target ranks."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.running import counters, processes_of
from tests.support.greedy_texts import stopped, text_answers
from tests.support.harness import (
    SSD,
    START_S,
    damage,
    engine,
    greedy,
    own_run_dir,
    serves,
    texts,
    wait_for,
    wait_gone,
)

SUBJECTS = ["rivers", "bread", "the moon", "prime numbers", "old maps", "honey", "tides", "chess"]
PROMPTS = [
    *(f"Explain {subject} to a child in three sentences." for subject in SUBJECTS),
    *(f"def {subject.replace(' ', '_')}(n):\n    " for subject in SUBJECTS[:4]),
    *(f"Once upon a time, {subject} and" for subject in SUBJECTS[:4]),
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "The capital of France is Paris. The capital of Italy is",
    "Q: What is 2 + 2?\nA:",
    "A",
    # Longer than max_num_batched_tokens below: prefilled in chunks by the target.
    *(f"List what you know about {s}. " * 20 for s in SUBJECTS[:4]),
]
STOP = ["ical", "."]
STORIES = slice(12, 16)  # prompts whose texts go on to the last token that is asked for
# The draft's positions: enough for the short prompts and their texts, too few for the long ones.
SHORT = 96
# Chunked prefill, more requests than fit at once, and so few KV blocks that some may be preempted.
OPTIONS = {
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 48,
    "num_gpu_blocks_override": 6,
    "disable_log_stats": False,
}


def run_all(llm) -> dict[str, object]:
    """Everything that is compared, from one engine."""
    single = [llm.generate([prompt], greedy(32), use_tqdm=False)[0] for prompt in PROMPTS[6:18:3]]
    return {
        "batch": texts(llm.generate(PROMPTS, greedy(), use_tqdm=False)),
        "single": texts(single),
        "stop": texts(llm.generate(PROMPTS[:6], greedy(48, stop=STOP), use_tqdm=False)),
        "beside_sampled": beside_sampled(llm),
    }


def cut(found, most: int) -> list[tuple[list[int], str | None]]:
    """What these texts are if fewer tokens are asked for."""
    return [(t, reason) if len(t) <= most else (t[:most], "length") for t, reason in found]


def beside_sampled(llm) -> list[object]:
    """Greedy texts of a batch in which every other request samples."""
    settings = [greedy(32), greedy(32, top_p=0.9)]
    settings[1].temperature = 0.8
    outputs = llm.generate(PROMPTS[:8], settings * 4, use_tqdm=False)
    return texts(outputs[::2])


def preemptions(llm) -> int:
    (metric,) = [m for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    return metric.value


@pytest.fixture(scope="module")
def plain(spoken_pair) -> dict[str, Any]:
    """What the target's own texts come to in ``run_all``."""
    target = spoken_pair[0]
    # The long ones apart, to whose length the others would be padded.
    batch = [*text_answers(target, PROMPTS[:-4], 64), *text_answers(target, PROMPTS[-4:], 64)]
    return {
        "batch": batch,
        "single": cut(batch[6:18:3], 32),
        "stop": stopped(target, cut(batch[:6], 48), STOP),
        "beside_sampled": cut(batch[:8:2], 32),
    }


@pytest.fixture(scope="module")
def llm(spoken_pair, tmp_path_factory) -> Iterator[Any]:
    """An engine whose draft knows ``SHORT`` positions. It leaves nothing when it goes."""
    target, draft = spoken_pair
    folder = tmp_path_factory.mktemp("short")
    for file in Path(draft).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": SHORT}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    # However busy the cores are, drafts are there in time.
    speculation = {**SSD, "k": 3, "f": 1, "model": str(folder), "max_wait_ms": 20000}
    speculation["max_restarts"] = 1000
    # Fewer drafts a row in batches than alone, which leaves some over for later rounds.
    speculation["num_speculative_tokens_per_batch_size"] = [[1, 2, 3], [3, 64, 2]]
    with engine(target, speculative_config=speculation, **OPTIONS) as llm:
        run_dir = own_run_dir()
        own = processes_of(run_dir)
        yield llm
    wait_gone(run_dir, own)


def test_same_tokens_as_the_target(llm, plain):
    """24 prompts x 64 tokens at batch 8, some alone, chunked prefill, stop strings."""
    found = run_all(llm)
    counted = counters(own_run_dir())
    # By how fast drafts come there are some preemptions, or none.
    print("preempted:", preemptions(llm))
    assert found == plain
    # It was speculation that made them, and outcomes were looked up in time.
    assert counted["hits"] + counted["misses"] > 0
    assert sum(counted["accepted"][1:]) > 0
    assert counted["verified"][2] < counted["verified"][1], "no row was trimmed"


def test_texts_longer_than_the_drafts_longest(llm, spoken_pair, plain):
    """Drafting stops for them, for nobody else, and serving goes on: for a text that becomes too
    long, beside one that is so from the start; then for the latter alone."""
    run_dir = own_run_dir()
    before = counters(run_dir)
    expected = [text_answers(spoken_pair[0], [PROMPTS[n]], SHORT)[0] for n in (12, -1)]
    outputs = llm.generate([PROMPTS[12], PROMPTS[-1]], greedy(SHORT), use_tqdm=False)
    assert texts(outputs) == expected
    sizes = [len(output.prompt_token_ids) for output in outputs]
    assert sizes[0] < SHORT < sizes[0] + len(outputs[0].outputs[0].token_ids) and SHORT < sizes[1]
    between = counters(run_dir)
    assert sum(between["accepted"][1:]) > sum(before["accepted"][1:])
    found = texts(llm.generate(PROMPTS[-1:], greedy(16), use_tqdm=False))
    assert found == cut(plain["batch"][-1:], 16)
    after = counters(run_dir)
    assert after["rounds"] > between["rounds"] and after["drafts"] == between["drafts"]


def test_a_draft_that_says_anything_and_one_that_dies(llm, plain):
    """What the draft says is damaged all the time; then it is killed in the middle of a batch."""
    run_dir = own_run_dir()
    with damage(run_dir):
        damaged = texts(llm.generate(PROMPTS[:12], greedy(), use_tqdm=False))
    assert damaged == plain["batch"][:12], "texts changed when the table was damaged"
    # The draft reads there as well, and may have been started anew.
    wait_for("living draft", lambda: serves(counters(run_dir)), START_S)
    counted = counters(run_dir)

    def kill_it() -> None:
        enough = sum(counted["accepted"]) + 20
        wait_for("verifications", lambda: sum(counters(run_dir)["accepted"]) > enough, START_S)
        with suppress(ProcessLookupError):
            os.kill(counted["pid"], signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_it)
        again = texts(llm.generate(PROMPTS[12:], greedy(32), use_tqdm=False))
        killed.result()
    assert again == cut(plain["batch"][12:], 32), "texts changed when the draft died"
