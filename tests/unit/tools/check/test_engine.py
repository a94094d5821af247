"""Engines that a start would take or refuse, of models without weights, and the draft's needs."""

import argparse
import shutil
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils import cpu_resource_utils

from benchmarks.standin.tiny import tiny_llama
from tests.support.gpu_hosts import gpus
from tests.support.model_folders import write_model
from vllm_ssd.config import draft_checks
from vllm_ssd.service import server_spec
from vllm_ssd.tools.check import command, engine
from vllm_ssd.tools.check.engine import examine_engine, examine_target_memory, parse_engine
from vllm_ssd.tools.check.findings import refusal


def look(models, draft, *further):
    """All findings, and the subject."""
    words = ["--dtype", "float32", "--enforce-eager", *further]
    steps, found = examine_engine(parse_engine(models.target, {"model": draft}, words)), []
    while True:
        try:
            found.append(next(steps))
        except StopIteration as end:
            return found, end.value
        except ValueError as error:
            return [*found, refusal("engine", error)], None


def test_a_pair_that_fits(models, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options = ["--speculative-config", '{"method": "ssd", "k": 3, "f": 2}', "--max-num-seqs", "4"]
    found, subject = look(models, models.draft, *options)
    assert all(each.state != "bad" for each in found)
    facts = {each.name: each.fact for each in found}
    assert "k=3, f=2" in facts["draft"] and "64 tokens" in facts["target"]
    assert facts["model runner"] == "V1" and "asks for 1.0 GiB" in facts["target's memory"]
    assert subject.backends == ("sdpa",) and subject.device.cores
    assert (subject.table.slots, subject.table.k, subject.table.branches) == (4, 3, 8)
    assert subject.memory.weights == 0, "there are none"
    assert 0 < subject.memory.block < subject.memory.cache <= 2**30
    assert facts["vocabularies"] == "each token id means the same text in both models"


def test_a_tokenizer_that_cannot_be_read(models, tmp_path):
    """A damaged file, of which the tokenizers' library says so in an error of its own."""
    shutil.copytree(models.draft, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    found, subject = look(models, str(tmp_path))
    (fact,) = [each.fact for each in found if each.name == "vocabularies"]
    assert subject is not None and "were not compared" in fact


def test_settings_that_cannot_be_sent(models, monkeypatch):
    """They are those of a start, which would send them to the draft's process."""
    monkeypatch.setattr(server_spec, "plain", lambda value: object())
    found, subject = look(models, models.draft)
    assert subject is None
    assert "cannot be sent (" in found[-1].fact
    assert found[-1].remedy == "report this"


NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'
SC, START = "--speculative-config", "until vllm serve starts without ssd"


@pytest.mark.parametrize(
    "draft, further, fact, remedy",
    [
        ("draft", ["-pp", "2"], "", "--tensor-parallel-size"),
        ("draft", [SC, '{"method":"ssd","draft_device":"4000"}'], "", "choose from"),
        ("draft", ["--max-model-len", "100000"], "", START),
        ("other", [], "different vocabularies", 'or write "vocabulary":"intersection" there'),
        # Options with which a start would not have ssd.
        (None, [SC, '{"k": 3}'], "has 'k' and no method", '"method":"ssd"'),
        (None, [SC, "[]"], "is no JSON object but []", '"method":"ssd"'),
        (None, [SC, NGRAM], "the speculative method is 'ngram'", '"method":"ssd"'),
    ],
)
def test_what_a_start_would_refuse(models, draft, further, fact, remedy):
    found, subject = look(models, draft and getattr(models, draft), *further)
    assert subject is None and found[-1].state == "bad"
    assert fact in found[-1].fact and remedy in found[-1].remedy


@pytest.mark.parametrize(("layers", "noted"), [(3, True), (4, False), (5, False)])
def test_a_draft_that_is_nearly_as_large_as_its_target(models, tmp_path, layers, noted):
    target = SimpleNamespace(target=write_model(tmp_path, layers=layers))
    found, subject = look(target, models.draft)
    notes = [each for each in found if each.name == "draft's size"]
    assert subject is not None and len(notes) == noted
    for note in notes:
        assert note.state == "note" and note.fact.startswith("about 33% of the target's: ")


def test_flags_replace_options(models):
    """All arguments of vllm serve are taken."""
    words = ["--speculative-config", '{"method": "ssd", "k": 3, "f": 2}']
    own = {"model": models.draft, "k": 9, "f": None}
    options = parse_engine(models.target, own, words).speculative_config
    assert options == {"method": "ssd", "model": models.draft, "k": 9, "f": 2}
    words = ["--chat-template", "a.jinja", "--port", "8001", "--max-num-seqs", "4"]
    found = parse_engine(models.target, {}, words)
    assert (found.speculative_config, found.max_num_seqs) == ({"method": "ssd"}, 4)


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    "target, fact, remedy",
    [
        ("/nowhere", "the target '/nowhere' is not a folder", "write its whole path"),
        ("nobody/nothing", "no config.json can be read from the Hugging Face", "the spelling"),
    ],
)
def test_targets_that_are_not_there(monkeypatch, offline, target, fact, remedy):
    def unreachable(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(draft_checks, "file_or_path_exists", unreachable)
    monkeypatch.setattr(EngineArgs, "create_engine_config", unreachable)
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    args = parser.parse_args(["check", target])
    monkeypatch.setattr("vllm_ssd.tools.check.software.examine_software", lambda: [])
    (found,) = command._look(args, [])
    assert found.state == "bad" and found.name == "engine"
    assert fact in found.fact and remedy in found.remedy


def test_weights_as_they_will_be_loaded(tmp_path):
    model = tiny_llama(1, 400, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    count = sum(each.numel() for each in model.parameters())
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        config = ModelConfig(str(tmp_path), dtype=dtype, skip_tokenizer_init=True)
        assert engine.weight_bytes(config) == count * size


@pytest.mark.parametrize(
    "free_gib, space, state, asked",
    [
        (18, None, "bad", "18.4 GiB"),
        (19, None, "ok", "18.4 GiB"),
        (18, "1", "ok", "1.0 GiB"),
        (18, "19", "bad", "19.0 GiB"),
    ],
)
def test_vllm_on_cpus_wants_most_of_the_memory(monkeypatch, free_gib, space, state, asked):
    """0.92 of 20 GiB must be free, unless the size of the KV cache is set."""
    node = cpu_resource_utils.MemoryNodeInfo(20 * 2**30, free_gib * 2**30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda _: node)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    (found,) = examine_target_memory()
    assert found.state == state and f"asks for {asked}" in found.fact
    assert ("VLLM_CPU_KVCACHE_SPACE" in found.remedy) == (state == "bad")


def test_vllm_on_gpus_asks_for_no_host_memory(monkeypatch):
    monkeypatch.setattr(engine, "current_platform", gpus(1))
    assert not list(examine_target_memory())
