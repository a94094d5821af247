"""The whole engine on GPUs: the target on one, the draft on another where there are two, Model
Runner V2."""

import json
import os
import signal
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.running import counters
from benchmarks.standin.checkpoint import WEIGHTS
from tests.gpu.settings import GPUS, OPTIONS, SSD, check_same_texts
from tests.support.harness import (
    damage,
    engine,
    greedy,
    own_run_dir,
    serves,
    texts,
    wait_for,
    wait_gone,
)
from vllm_ssd.metrics import describe

PROMPTS = [f"Explain {s} to a child." for s in ("rivers", "bread", "the moon", "chess", "tides")]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_same_tokens_over_two_gpus(models, tmp_path, parallel):
    """Two target ranks: only one looks into the table, both verify the same drafts. It is the first
    one of a stage, or the last stage. Where there are no more GPUs than ranks, the draft shares the
    second rank's."""
    from benchmarks.standin import SHAPES, write_standin

    write_standin(Path(models[0]), SHAPES["even"], tmp_path)
    shared = {"draft_device": 1} if GPUS == 2 else {}
    speculation = {"method": "ssd", "k": 4, "f": 2, "model": models[1], **shared}
    options = {"dtype": "float32", f"{parallel}_parallel_size": 2}
    counted = check_same_texts(str(tmp_path), speculation, [PROMPTS], 96, **options)
    assert sum(counted["accepted"][1:]) > 0, "no draft was accepted"


@pytest.fixture(scope="module")
def plain(models):
    """The greedy texts of an engine without drafts."""
    with engine(models[0], dtype="float32", **OPTIONS) as llm:
        return texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False))


def test_one_request_at_a_time(models, plain):
    """As small as engines get, with a draft in fp8."""
    fp8 = {"quantization": "fp8", "draft_dtype": "bfloat16"}
    speculation = {**SSD, "k": 4, "f": 2, "model": models[1], **fp8}
    options = {**OPTIONS, "dtype": "float32", "max_num_seqs": 1}
    with engine(models[0], speculative_config=speculation, **options) as llm:
        assert texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False)) == plain
        assert sum(counters(own_run_dir())["accepted"][1:]) > 0, "no draft was accepted"


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_same_tokens_with_and_without(models, plain, method):
    """Also when all that the draft says is damaged, when it dies, and when another one has come."""
    speculation = {**SSD, "k": 4, "f": 2, "model": models[1], "draft_sample_method": method}
    # What it reads of its own words is damaged, too, and it may be started anew again and again.
    speculation["max_restarts"] = 1000
    with engine(models[0], dtype="float32", speculative_config=speculation, **OPTIONS) as llm:
        run_dir = own_run_dir()
        found = texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False))
        counted = counters(run_dir)
        print(describe(counted))
        assert found == plain
        assert sum(counted["accepted"][1:]) > sum(counted["accepted"]) // 3

        with damage(run_dir):
            assert beside_sampled(llm) == plain, "damaged"
        wait_for("living draft", lambda: serves(counters(run_dir)), 120)

        pid = counters(run_dir)["pid"]
        os.kill(pid, signal.SIGKILL)
        assert texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False)) == plain, "without a draft"
        wait_for("another draft", lambda: counters(run_dir)["pid"] != pid, 120)
        before = counters(run_dir)["accepted"]
        assert texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False)) == plain, "with another"
        assert sum(counters(run_dir)["accepted"][1:]) > sum(before[1:])
    wait_gone(run_dir)


def test_a_draft_with_another_vocabulary(models, plain, tmp_path):
    """In which token t of SmolLM2 has the number 7t + 11."""
    copytree(models[1], tmp_path, dirs_exist_ok=True)
    words, weights = tmp_path / "tokenizer.json", load_file(tmp_path / WEIGHTS)
    table = weights["model.embed_tokens.weight"]
    numbers = (7 * torch.arange(len(table)) + 11) % len(table)
    weights["model.embed_tokens.weight"] = table[numbers.argsort()]
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    said = json.loads(words.read_text())
    said["model"]["vocab"] = {w: int(numbers[t]) for w, t in said["model"]["vocab"].items()}
    said["added_tokens"] = [{**a, "id": int(numbers[a["id"]])} for a in said["added_tokens"]]
    words.write_text(json.dumps(said))
    speculation = {**SSD, "k": 4, "f": 2, "model": str(tmp_path), "vocabulary": "intersection"}
    with engine(models[0], dtype="float32", speculative_config=speculation, **OPTIONS) as llm:
        assert texts(llm.generate(PROMPTS, greedy(128), use_tqdm=False)) == plain
        accepted = counters(own_run_dir())["accepted"]
    assert sum(accepted[1:]) > sum(accepted) // 3


def beside_sampled(llm: Any) -> list[Any]:
    """Greedy texts of a batch in which every other request samples, after a look at the others:
    each has run to its end, and consists of tokens that there are."""
    from vllm import SamplingParams

    sampled = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True)
    outputs = llm.generate(
        [prompt for prompt in PROMPTS for _ in range(2)],
        [greedy(128), sampled] * len(PROMPTS),
        use_tqdm=False,
    )
    size = llm.model_config.get_vocab_size()
    for tokens, reason in texts(outputs[1::2]):
        assert reason == "length" and len(tokens) == 128
        assert all(0 <= token < size for token in tokens)
    return texts(outputs[::2])


def test_flashinfer_drafts_for_itself(models):
    """In bf16 a draft that equals its target is right but for tokens that are nearly alike, 2 or 3
    in a hundred, so that all k drafts are accepted in about 0.9 of the rounds."""
    speculation = {**SSD, "k": 4, "f": 2, "model": models[0], "tree_backend": "flashinfer"}
    speculation["max_wait_ms"] = 2000  # what it accepts is the question here, not how fast
    with engine(models[0], dtype="bfloat16", speculative_config=speculation, **OPTIONS) as llm:
        run_dir = own_run_dir()
        llm.generate(PROMPTS, greedy(128), use_tqdm=False)
        counted = counters(run_dir)
    print(describe(counted))
    assert sum(counted["accepted"][4:]) > 0.8 * sum(counted["accepted"])
