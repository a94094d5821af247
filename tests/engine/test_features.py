"""vLLM's features with SSD and without it: the same results, and drafts had a part in them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.common.running import counters
from tests.support.features import FEATURES, OPTIONS, run_all
from tests.support.features.prompts import LONG, SHORT
from tests.support.features.results import Refused, difference, generate, refusal
from tests.support.features.sampling_parameters import CHOICE, NAMES, REGEX
from tests.support.harness import (
    LIGHT,
    SSD,
    accepted_drafts,
    engine,
    greedy,
    own_run_dir,
    serves,
    wait_for,
)
from vllm_ssd.metrics import subtract

# One token a request, which ends with its prompt; or no request at all.
WITHOUT_DRAFTS = {"beam search", "embed"}


@dataclass
class Runs:
    """plain, ssd: name -> result, of an engine without SSD and of one with it. accepted: name ->
    number of drafts that were accepted for it."""

    plain: dict[str, Any]
    ssd: dict[str, Any]
    accepted: dict[str, int]
    llm: Any  # with SSD, after all that


@pytest.fixture(scope="module")
def plain(target) -> dict[str, Any]:
    with engine(target, **OPTIONS) as llm:
        return run_all(llm)[0]


@pytest.fixture(scope="module")
def runs(target, draft, plain) -> Iterator[Runs]:
    options = {**OPTIONS, "per_request_spec_decode_metrics": "summary"}
    speculation = {**SSD, **LIGHT, "k": 3, "f": 1, "model": draft}
    with engine(target, speculative_config=speculation, **options) as llm:
        run_dir = own_run_dir()
        ssd, accepted = run_all(llm, lambda: accepted_drafts(run_dir))
        yield Runs(plain, ssd, accepted, llm)


@pytest.mark.parametrize("name", [*NAMES, *FEATURES])
def test_same_result(runs, name):
    assert difference(runs.plain[name], runs.ssd[name], name) is None
    assert isinstance(runs.ssd[name], Refused) == (name == "embed")
    assert name in WITHOUT_DRAFTS or runs.accepted[name] > 0


def test_features_have_an_effect(runs):
    """What is compared above is not the same as without the feature."""
    results, text = runs.ssd, {name: runs.ssd[name][0]["text"] for name in NAMES}
    for name in ("presence", "frequency", "repetition", "bad words", "allowed tokens"):
        assert text[name] != text["plain"]
    assert not re.search(r"\bthe\b", text["bad words"])
    assert len(results["n"]) == 3 and all(each["tokens"] for each in results["n"])
    for name, top in (("logprobs", 5), ("logprobs under a penalty", 3)):
        assert all(top <= len(position) <= top + 1 for position in results[name][0]["logprobs"])
    assert text["stop"].endswith(" a") and results["stop"][0]["finish"] == "stop"
    sizes = {name: len(results[name][0]["tokens"]) for name in NAMES}
    assert sizes["stop token"] < 12 < sizes["least tokens"]
    assert results["end at a repetition"][0]["finish"] == "repetition"
    assert results["end"][0]["finish"] == "stop" and sizes["end"] < sizes["beyond the end"]
    for name in ("JSON", "JSON by guidance"):
        assert json.loads(text[name])["age"] in (7, 77)
    thoughts, content = text["JSON after thoughts"].split(".", maxsplit=1)
    assert len(thoughts.split()) > 3 and json.loads(content)["age"] in (7, 77)
    assert re.fullmatch(REGEX, text["regex"]) and text["choice"] in CHOICE
    assert re.fullmatch(r"select \w+(, \w+){0,2} from \w+", text["grammar"].strip())


def test_adapters_and_caches_have_an_effect(runs):
    adapted, own = runs.ssd["LoRA"]["with"], runs.ssd["LoRA"]["without"]
    assert adapted[0][0]["tokens"] != own[0][0]["tokens"]
    assert own[0][0]["text"] == runs.ssd["plain"][0]["text"][: len(own[0][0]["text"])]
    assert [hit for _, hit, _ in runs.ssd["prefix cache"]] == [False, True, False]
    assert runs.ssd["sleep"][0] == ["abort"]


def test_refused_requests_leave_the_others_alone(runs):
    """What no speculative method can serve; the words are tested in test_refusals.py."""
    from vllm import SamplingParams

    for options in ({"min_p": 0.1}, {"logit_bias": {5: 2.0}}):
        # Not greedy: then vLLM would leave min_p out of account, and accept it.
        settings = SamplingParams(temperature=1.0, max_tokens=8, **options)
        said = refusal(lambda s=settings: generate(runs.llm, [SHORT, LONG], s))
        assert said is not None and "speculative decoding" in said.text
    (found,) = generate(runs.llm, [SHORT], greedy(20))
    assert found == runs.plain["plain"]


def test_vllm_counts_what_ssd_counts(runs):
    """The numbers of rounds of a request that accepted 1, 2, .. k drafts."""

    def total() -> float:
        name = "vllm:spec_decode_num_accepted_tokens"
        return sum(metric.value for metric in runs.llm.get_metrics() if metric.name == name)

    run_dir = own_run_dir()
    # The last feature was sleep, and the engine is awake before its draft is loaded again.
    wait_for("the draft, awake", lambda: serves(counters(run_dir)))
    before, vllms = counters(run_dir), total()
    (output,) = runs.llm.generate([SHORT], greedy(20), use_tqdm=False)
    between = subtract(counters(run_dir), before)
    own, of_request = between["accepted"], output.outputs[0].spec_decode_metrics
    assert of_request.histogram[1:] == own[1:]
    assert of_request.num_draft_tokens == sum(between["verified"])
    assert total() - vllms == sum(drafts * times for drafts, times in enumerate(own)) > 0
    (rounds,) = [m for m in runs.llm.get_metrics() if m.name == "vllm:ssd_round_tokens"]
    assert rounds.count == sum(counters(run_dir)["accepted"])


def test_a_request_can_turn_drafting_off(runs):
    """Beside others that have drafts; every text is the same as without the method."""
    run_dir, prompts = own_run_dir(), [SHORT, LONG, SHORT, LONG]

    def texts_of(settings):
        return [answers[0]["tokens"] for answers in generate(runs.llm, prompts, settings)]

    on, off = greedy(16), greedy(16, extra_args={"ssd": 0})
    expected = texts_of([on] * 4)
    before = counters(run_dir)
    assert texts_of([off] * 4) == expected
    assert counters(run_dir)["rounds"] == before["rounds"]
    assert texts_of([on, on, off, off]) == expected
    assert counters(run_dir)["rounds"] > before["rounds"]
