"""Engines that a start would take or refuse, of models without weights, and the draft's needs."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from vllm.config import ModelConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs

from benchmarks.standin.tiny import tiny_llama
from tests.support.gpu_hosts import gpus
from tests.support.model_folders import write_model
from vllm_ssd.config import draft_checks
from vllm_ssd.lifecycle import server_spec
from vllm_ssd.lifecycle.placement import DraftDevice
from vllm_ssd.tools.check import command, machine
from vllm_ssd.tools.check.devices import Trial
from vllm_ssd.tools.check.engine import examine_engine, parse_engine, usual_subject, weight_bytes
from vllm_ssd.tools.check.findings import Finding, could_start


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> SimpleNamespace:
    def make(name, **shape):
        return write_model(tmp_path_factory.mktemp(name), **shape)

    others = [f"v{i}" for i in range(60)]
    return SimpleNamespace(
        target=make("target", layers=2), draft=make("draft"), other=make("other", words=others)
    )


def look(models, draft, *further):
    """All findings, and the subject."""
    words = ["--dtype", "float32", "--enforce-eager", *further]
    steps, found = examine_engine(parse_engine(models.target, {"model": draft}, words)), []
    while True:
        try:
            found.append(next(steps))
        except StopIteration as end:
            return found, end.value


def test_a_pair_that_fits(models, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options = ["--speculative-config", '{"method": "ssd", "k": 3, "f": 2}', "--max-num-seqs", "4"]
    found, subject = look(models, models.draft, *options)
    assert could_start(found)
    facts = {each.name: each.fact for each in found}
    assert "k=3, f=2" in facts["draft"] and facts["vocabularies"].startswith("64 tokens")
    assert facts["model runner"] == "V1" and "asks for 1.0 GiB" in facts["target's memory"]
    assert subject.draft.backends == ("sdpa",) and subject.device.cores
    assert (subject.table.slots, subject.table.k, subject.table.branches) == (4, 3, 8)
    assert subject.draft.memory.weights is None, "there are none"
    assert 0 < subject.draft.memory.least < subject.draft.memory.kv_cache <= 2**30


def test_settings_that_cannot_be_sent(models, monkeypatch):
    """They are those of a start, which would send them to the draft's process."""
    monkeypatch.setattr(server_spec, "plain", lambda value: object())
    found, subject = look(models, models.draft)
    assert subject is None and (found[-1].state, found[-1].name) == ("bad", "draft's settings")
    assert "cannot be sent (Encoding objects of type object" in found[-1].fact
    assert found[-1].remedy == "report this"


@pytest.mark.parametrize(
    "further, name, remedy",
    [
        (["-pp", "2"], "engine", "--tensor-parallel-size"),
        (
            ["--speculative-config", '{"method": "ssd", "draft_device": "4000"}'],
            "engine",
            "choose from",
        ),
        (["--max-model-len", "100000"], "target", "until vllm serve starts without ssd"),
    ],
)
def test_what_a_start_would_refuse(models, further, name, remedy):
    found, subject = look(models, models.draft, *further)
    assert subject is None
    assert found[-1].state == "bad" and found[-1].name == name
    assert remedy in found[-1].remedy


@pytest.mark.parametrize(
    "options, fact",
    [
        ('{"k": 3}', "has 'k' and no method"),
        ("[]", "is no JSON object but []"),
        ('{"method": "ngram", "num_speculative_tokens": 2}', "the speculative method is 'ngram'"),
    ],
)
def test_options_with_which_a_start_would_not_have_ssd(models, options, fact):
    found, subject = look(models, None, "--speculative-config", options)
    assert subject is None and found[-1].state == "bad"
    assert fact in found[-1].fact and '"method":"ssd"' in found[-1].remedy


@pytest.mark.parametrize(("layers", "noted"), [(3, True), (4, False), (5, False)])
def test_a_draft_that_is_nearly_as_large_as_its_target(models, tmp_path, layers, noted):
    target = SimpleNamespace(target=write_model(tmp_path, layers=layers))
    found, subject = look(target, models.draft)
    notes = [each for each in found if each.name == "draft's size"]
    assert subject is not None and len(notes) == noted
    for note in notes:
        assert note.state == "note" and note.fact.startswith("about 33% of the target's: ")


def test_flags_replace_options(models):
    words = ["--speculative-config", '{"method": "ssd", "k": 3, "f": 2}']
    own = {"model": models.draft, "k": 9, "f": None}
    options = parse_engine(models.target, own, words).speculative_config
    assert options == {"method": "ssd", "model": models.draft, "k": 9, "f": 2}
    assert parse_engine(models.target, {}, []).speculative_config == {"method": "ssd"}


def test_another_vocabulary(models):
    found, subject = look(models, models.other)
    assert subject is None and [each.state for each in found] == ["ok", "bad"]
    assert "different vocabularies" in found[-1].fact and "name another" in found[-1].remedy


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
    assert found.state == "bad" and found.name == "target"
    assert fact in found.fact and remedy in found.remedy


def test_all_arguments_of_vllm_serve_are_taken(models):
    words = ["--chat-template", "a.jinja", "--port", "8001", "--max-num-seqs", "4"]
    assert parse_engine(models.target, {}, words).max_num_seqs == 4


def test_weights_as_they_will_be_loaded(tmp_path):
    model = tiny_llama(1, 400, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    count = sum(each.numel() for each in model.parameters())
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        config = ModelConfig(str(tmp_path), dtype=dtype, skip_tokenizer_init=True)
        assert weight_bytes(config) == count * size


def test_one_gpu_is_too_few(monkeypatch):
    monkeypatch.setattr(machine, "current_platform", gpus(1))
    with pytest.raises(ValueError, match="its draft needs 1 more"):
        machine.subject_without_target()


@pytest.mark.parametrize("shared", [False, True])
def test_both_gpus_are_tried_as_their_processes_see_them(monkeypatch, capsys, shared):
    """The draft's with its attention, and the target's first one, unless that is the same. Before
    each the user reads how long it may take."""
    asked: list[tuple[str, tuple[str, ...]]] = []

    def try_gpu(trial: Trial, environment):
        assert "at most 900 s" in capsys.readouterr().err
        assert trial.table == "/a/table" and (trial.draft is None) == ("draft" not in trial.users)
        asked.append((environment["CUDA_VISIBLE_DEVICES"], trial.users))
        yield Finding("ok", trial.name, "was tried")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "current_platform", gpus(3))
    monkeypatch.setattr(machine, "try_gpu", try_gpu)
    draft = 0 if shared else 2
    device = DraftDevice([], draft, {"CUDA_VISIBLE_DEVICES": str(draft)})
    parallel = ParallelConfig(distributed_executor_backend="uni")
    subject = usual_subject(device, parallel)
    found = list(machine._try_gpus(subject, device, "/a/table", all_backends=True))
    if shared:
        assert asked == [("0", ("draft", "target"))] and len(found) == 1
    else:
        assert asked == [("2", ("draft",)), ("0", ("target",))] and len(found) == 2
