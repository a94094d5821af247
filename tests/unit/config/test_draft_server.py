"""Options of an engine whose drafts come from a draft server."""

import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial

import pytest
from msgspec.structs import replace
from vllm.config import ModelConfig, ParallelConfig
from vllm.platforms import current_platform

from tests.support.hub_cache import commit_of
from tests.support.model_folders import write_model
from tests.support.sentences import refused
from vllm_ssd.config import draft_server
from vllm_ssd.config.options import OPTIONS, make_ssd_config
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.table import TableOwner, TableShape
from vllm_ssd.table.draft_names import DraftName, NoDraftServer, publish


@pytest.fixture
def serve(make):
    """Publishes a draft server of this name with these options, until the test ends. published: in
    place of those that were checked. named: in place of all."""
    begun = []

    def serve(name: str, published=(), named=None, **options) -> None:
        named = named or DraftName(name, draft_server.common_options(make(**options)))
        if published:
            named = replace(named, options=replace(named.options, **published))
        begun.append(OwnFiles(TableShape(1, 2, 3), TableOwner()))
        publish(begun[-1].run_dir, named)

    yield serve
    for files in begun:
        files.remove()


def test_what_is_in_common_is_taken_over(make, serve, draft):
    serve("drafts", k=3, f=2, draft_top_m=8, saguaro=0.5)
    config = make(draft_server="drafts", model=None, on_miss="skip")
    assert (config.k, config.f, config.draft_top_m, config.saguaro) == (3, 2, 8, 0.5)
    assert config.draft_model == draft and config.num_speculative_tokens == 3
    assert (config.on_miss, config.draft_server) == ("skip", "drafts")
    said_again = make(draft_server="drafts", k=3, f=2, model=draft, draft_top_m=8)
    assert said_again.f == config.f


def test_a_server_started_with_its_draft_waits(make, serve):
    """A draft needs some seconds before it has its name."""
    with ThreadPoolExecutor() as pool:
        made = pool.submit(make, draft_server="drafts", model=None)
        time.sleep(0.3)
        serve("drafts", k=4)
        assert made.result(20).k == 4


def test_it_waits_for_one_in_a_ray_cluster(make, monkeypatch):
    answers = [draft_server.common_options(make(k=4)), NoDraftServer("none yet")]

    def described(*_):
        if isinstance(answer := answers.pop(), ValueError):
            raise answer
        return answer

    monkeypatch.setattr(draft_server, "described", described)
    assert make(draft_server="drafts", ray_address="auto", model=None).k == 4


def test_defaults_are_those_of_the_server(make, serve, monkeypatch):
    serve("drafts", draft_sample_method="greedy")
    # An engine on a GPU would have chosen others.
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    config = make(draft_server="drafts", model=None)
    assert (config.k, config.f, config.top_m) == (7, 3, 0)
    serve("sampled")
    assert make(draft_server="sampled", model=None, draft_top_m=32).top_m == 32


def test_branches_are_compared_by_their_commits(hub, serve):
    """The draft server says which commit it has loaded; engines may name that or its branch."""
    target, draft = "Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"
    make = partial(make_ssd_config, target_model_config=ModelConfig(target))
    make = partial(make, target_parallel_config=ParallelConfig())
    named = DraftName("drafts", draft_server.common_options(make({"model": draft})))
    serve("drafts", named=named)
    for revision in (None, "main", commit_of(draft)):
        config = make({"draft_server": "drafts", "revision": revision})
        assert config.revision == commit_of(draft) and config.draft_model == draft
        both = make({"draft_server": "drafts", "model": draft, "revision": revision})
        assert not config.model_named_here and both.model_named_here == (revision is not None)
    with refused(f"and '{commit_of(draft)}' at the draft server 'drafts'"):
        make({"draft_server": "drafts", "revision": commit_of(target)})
    serve("others", {"revision": "of_another_machine"}, replace(named, name="others"))
    with refused(f"the Hugging Face Hub's model '{draft}' at revision 'of_another_machine'"):
        make({"draft_server": "others"})


@pytest.mark.parametrize(
    "options, said",
    [
        ({"k": 5}, "k is 5 in --speculative-config and 3 at the draft server 'drafts'"),
        ({"draft_sample_method": "greedy"}, "draft_sample_method is 'greedy'"),
        ({"max_model_len": 100}, "max_model_len is 100"),
        *(({"model": model}, f"model is {model!r}") for model in ("another/draft", ["a"])),
        ({"revision": "main"}, "and None at the draft server"),
        ({"draft_device": 1}, "leave draft_device out, or give it to 'vllm-ssd draft'"),
        ({"num_speculative_tokens": 5}, "k is 5 in --speculative-config and 3 at the draft"),
        ({"vocabulary": "intersection"}, "leave out vocabulary, or draft_server"),
        (
            {"draft_server": "other"},
            "has no draft server 'other' on this machine (running in the temporary folder ",
        ),
        ({"draft_server": "dp:1-2"}, "draft_server 'dp:1-2' cannot be the name of a draft server"),
        ({"draft_server": 7}, "draft_server must be the --name of a draft"),
        ({"draft_server": None, "ray_address": "auto"}, "add its name as draft_server"),
    ],
)
def test_what_does_not_fit_is_refused(refusal, serve, monkeypatch, options, said):
    monkeypatch.setattr(draft_server, "BEGINS_S", 0.0)
    serve("drafts", k=3)
    assert said in refusal(**{"draft_server": "drafts", "model": None, **options})


def test_the_vocabularies_are_compared(refusal, serve, models):
    serve("drafts", {"model": models.other})
    said = refusal(draft_server="drafts", model=None)
    assert "have different vocabularies" in said and "intersection" not in said
    assert 'to the draft: name another "draft_server" in --speculative-config' in said


@pytest.mark.parametrize("option, value", [("k", 99), ("f", -1), ("saguaro", 0.0)])
def test_a_value_that_no_engine_takes(refusal, serve, option, value):
    serve("drafts", {option: value})
    assert f"{option} must be a" in refusal(draft_server="drafts", model=None)


@pytest.fixture
def with_code(tmp_path):
    """A model whose config is code that comes with it, and the file that this code writes."""
    written = tmp_path / "ran"
    about = {"model_type": "ours", "auto_map": {"AutoConfig": "code.Config"}}
    model = write_model(tmp_path / "model", **about)
    (tmp_path / "model" / "code.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig\n"
        f"Path({str(written)!r}).touch()\n"
        "class Config(LlamaConfig):\n"
        "    model_type = 'ours'\n"
    )
    return model, written


def test_a_draft_server_chooses_no_code(hub, target, serve, with_code):
    """Of a target whose own code the user trusts."""
    model, written = with_code
    trusting = copy(target)
    trusting.trust_remote_code = True

    def make(**options):
        return make_ssd_config({"draft_server": "drafts", **options}, trusting, ParallelConfig())

    serve("drafts", {"model": model, "revision": "r"})
    for options in ({}, {"model": model}):
        with refused('repeat the "model" and the revisions of the draft server'):
            make(**options)
        assert not written.exists()
    make(model=model, revision="r")
    assert written.exists()


def test_each_option_is_said_in_one_place():
    """To the draft server, to the engine, or to both, who then agree."""
    process, common = set(draft_server.OF_ITS_PROCESS), set(draft_server.COMMON)
    assert not process & common and process | common <= set(OPTIONS)
