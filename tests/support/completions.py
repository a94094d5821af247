"""Greedy texts of random models, with drafts and without: whether they are the same."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks.common.running import counters, run_dir_of
from tests.support.forked import in_fork
from tests.support.harness import accepted_drafts, engine, greedy


def check_texts(
    folder: str,
    batches: Sequence[Sequence[list[int]]],
    count: int,
    options: dict[str, Any],
    speculations: Sequence[dict[str, Any]],
    near: float,
    accepts: bool = True,
    joined_by: Sequence[list[int]] = (),
) -> int:
    """An ``AssertionError`` if an engine with one of these speculative configs says other texts, of
    ``count`` tokens each, than an engine without; or accepts no draft, if ``accepts``. Prints how
    many are equal. near: see ``parting``; joined_by: see ``complete``. Returns the rounds without
    draft tokens in the last engine."""
    plain, *_ = in_fork(complete, folder, batches, count, options, joined_by)
    assert len({token for text in plain for token in text.tokens}) > count, "the same always"
    off = 0
    for speculation in speculations:
        speculative = {**options, "speculative_config": speculation}
        found, accepted, off = in_fork(complete, folder, batches, count, speculative, joined_by)
        equal = sum(ours.tokens == theirs.tokens for ours, theirs in zip(plain, found))
        print(f"{speculation}: {equal} of {len(plain)} texts equal, {accepted} drafts accepted")
        check_alike(plain, found, near)
        assert accepted > 0 or not accepts
    return off


class Completion(NamedTuple):
    """tokens: of a text. leads: of each one, how much likelier than the second likeliest the
    likeliest token was, as a difference of log probabilities."""

    tokens: list[int]
    leads: list[float]


def complete(
    folder: str,
    batches: Sequence[Sequence[list[int]]],
    count: int,
    options: dict[str, Any],
    joined_by: Sequence[list[int]] = (),
) -> tuple[list[Completion], int, int]:
    """The texts of batches of prompts, ``count`` tokens each, one batch after the other; how many
    drafts were accepted; and the rounds without draft tokens. joined_by: prompts that join each
    batch after some steps. The engine must be in this process."""
    import tests.support.random_models  # noqa: F401, for its load format

    asked = greedy(count, ignore_eos=True, detokenize=False, logprobs=2)
    if not torch.cuda.is_available():
        torch.compiler.set_stance("force_eager")  # how vLLM ranks tokens compiles for 3 s
    outputs = []
    with engine(folder, **options) as llm:
        for prompts in batches:
            outputs += _generate(llm, prompts, joined_by, asked)
        run_dir = run_dir_of([psutil.Process()])
        accepted = accepted_drafts(run_dir) if run_dir else 0
        off = counters(run_dir)["off"] if run_dir else 0
    return [completion(output) for output in outputs], accepted, int(off)


def completion(output: Any) -> Completion:
    """What one of vLLM's outputs says. It has the log probabilities of two tokens at each place."""
    (text,) = output.outputs
    leads = [lead(token.logprob for token in each.values()) for each in text.logprobs]
    return Completion(list(text.token_ids), leads)


def _generate(
    llm: Any, prompts: Sequence[list[int]], joined_by: Sequence[list[int]], sampling: Any
) -> list[Any]:
    """vLLM's outputs for the prompts, and for those that join them after four steps."""
    requests = [
        (str(number), {"prompt_token_ids": prompt}, sampling)
        for number, prompt in enumerate([*prompts, *joined_by])
    ]
    for request in requests[: len(prompts)]:
        llm.llm_engine.add_request(*request)
    steps = [llm.llm_engine.step() for _ in range(4)]
    for request in requests[len(prompts) :]:
        llm.llm_engine.add_request(*request)
    while llm.llm_engine.has_unfinished_requests():
        steps.append(llm.llm_engine.step())
    done = {output.request_id: output for step in steps for output in step if output.finished}
    return [done[number] for number, *_ in requests]


def check_alike(plain: Sequence[Completion], others: Sequence[Completion], near: float) -> None:
    """An ``AssertionError`` if a text is not the plain one. near: see ``parting``."""
    pairs = zip(plain, others, strict=True)
    partings = [each for pair in pairs if (each := parting(*pair, near))]
    assert not partings, partings


def lead(chances: Iterable[float]) -> float:
    """By how much the likeliest of these log probabilities is before the second."""
    best, second = sorted(chances, reverse=True)[:2]
    return best - second


def parting(plain: Completion, other: Completion, near: float) -> str | None:
    """Where a text is not the plain one, although another token was clearly less likely there. From
    a place where the two likeliest were as near as ``near``, texts may part."""
    for place, tokens in enumerate(zip(plain.tokens, other.tokens, strict=True)):
        if tokens[0] != tokens[1]:
            lead = plain.leads[place]
            said = f"token {place} is {tokens[1]} and not {tokens[0]}, which leads by {lead:.3f}"
            return said if lead > near else None
    return None
