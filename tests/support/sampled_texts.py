"""Sampled texts of a whole engine against the target's exact distribution.

Target and draft are different random functions of a few tokens, so that drafts are accepted and
rejected alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.common.running import counters
from benchmarks.standin.tiny import tiny_llama
from tests.support.chi_square import chance_of
from tests.support.features import reasoning_parser
from tests.support.harness import START_S, engine, own_run_dir, serves, wait_for
from tests.support.tiny_tokenizer import TOKENS as VOCABULARY
from tests.support.tiny_tokenizer import save_tokenizer
from vllm_ssd.metrics import subtract

VOCAB, TOKENS, TEXTS, K = len(VOCABULARY), 3, 2000, 3
PROMPT = [1, 5, 0, 2, 3]
TEMPERATURE = 0.8
SEEDED = 40  # tokens of a text with a seed

# A text so far, without the prompt, and the logits of its next token -> the logits that are sampled
# from, before the temperature.
Change = Callable[[list[int], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What texts are sampled with. settings: of ``SamplingParams``; change: what vLLM makes of
    logits under these; stop: the token that ends a text, None if none does."""

    settings: dict[str, Any] = field(default_factory=dict)
    change: Change = lambda text, logits: logits
    prompt: Sequence[int] = tuple(PROMPT)
    texts: int = TEXTS
    stop: int | None = None


# What is sampled from: temperature only; and what top-k and top-p leave of it.
CUTS = {"plain": Case(), "top-k and top-p": Case({"top_k": 4, "top_p": 0.85})}


METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"draft_sample_method": "greedy"},
    "probabilistic": {"draft_sample_method": "probabilistic", "draft_top_m": 4},
    "Saguaro": {"draft_sample_method": "probabilistic", "saguaro": 0.4},
}


def make_pair(folder: Path) -> tuple[Path, Path]:
    """(target, draft): the draft is the target with other output weights."""
    model = tiny_llama(3, VOCAB, head_dim=64, initializer_range=0.2)
    target, draft = folder / "target", folder / "draft"
    with torch.no_grad():
        model.lm_head.weight *= 0.3  # no token is nearly certain
    model.save_pretrained(target)
    save_tokenizer(target)
    with torch.no_grad():
        model.lm_head.weight += 0.06 * torch.randn_like(model.lm_head.weight)
    model.save_pretrained(draft)
    return target, draft


def exact(target: Path, case: Case) -> torch.Tensor:
    """Probabilities of all texts of TOKENS tokens after the prompt, [VOCAB ** TOKENS]. A text that
    has ended goes on with the token that ended it."""
    model = LlamaForCausalLM.from_pretrained(target).float().eval()
    texts, probs = torch.tensor([case.prompt]), torch.ones(1, dtype=torch.float64)
    for _ in range(TOKENS):
        with torch.inference_mode():
            rows = model(texts).logits[:, -1].double()
        generated = texts[:, len(case.prompt) :].tolist()
        probs = (probs.unsqueeze(1) * _next_token(case, generated, rows)).view(-1)
        texts = torch.cat(
            [texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts)).view(-1, 1)],
            dim=1,
        )
    return probs


def _next_token(case: Case, texts: list[list[int]], rows: torch.Tensor) -> torch.Tensor:
    """Probabilities [texts, VOCAB] from logits of the same shape."""
    logits = torch.stack([case.change(text, row) for text, row in zip(texts, rows)]) / TEMPERATURE
    if "top_k" in case.settings:
        ordered, tokens = logits.sort(dim=-1, descending=True)
        ordered[:, int(case.settings["top_k"]) :] = float("-inf")
        share = ordered.softmax(-1)
        ordered[share.cumsum(-1) - share >= case.settings["top_p"]] = float("-inf")
        logits = torch.empty_like(logits).scatter_(1, tokens, ordered)
    probs = logits.softmax(-1)
    if case.stop is not None:
        ended = torch.tensor([case.stop in text for text in texts])
        probs[ended] = torch.eye(VOCAB, dtype=torch.float64)[case.stop]
    return probs


def check(
    pair: tuple[Path, Path],
    method: dict[str, Any],
    cases: dict[str, Case] = CUTS,
    seeds: bool = True,
    **options: Any,
) -> None:
    """One engine, with a method of drafting: enough texts of each case to see a wrong distribution.
    Texts of all cases are sampled beside each other. seeds: whether a seed fixes the text, too, of
    a request by itself; not where drafts are left out by what was accepted lately."""
    target, draft = pair
    speculation = {"method": "ssd", "k": K, "f": 1, "model": str(draft), "on_miss": "wait"}
    options = {**options, "max_model_len": 64, "max_num_seqs": 64}
    options |= {
        "reasoning_parser": "one-sentence",
        "reasoning_parser_plugin": reasoning_parser.__file__,
    }
    # All k drafts are always there, however busy the machine is.
    speculation |= {"max_wait_ms": 20000, **method}
    with engine(str(target), speculative_config=speculation, **options) as llm:
        run_dir = own_run_dir()
        chances = {
            name: chance_of(texts, VOCAB, exact(target, cases[name]))
            for name, texts in _sample(llm, cases).items()
        }
        counted = counters(run_dir)
        by_seed = [_seeded(llm, run_dir, seed) for seed in (1, 2, 1, 2)] if seeds else []
    assert by_seed[:2] == by_seed[2:], "a seed has two texts"
    assert not seeds or by_seed[0] != by_seed[1]
    assert all(chance > 1e-4 for chance in chances.values()), chances
    assert sum(counted["accepted"][1:]) > TEXTS / 4, "few drafts were accepted"
    assert counted["accepted"][0] > TEXTS / 4, "few drafts were rejected"


def _seeded(llm: Any, run_dir: Path, seed: int) -> list[int]:
    """A text of a request with this seed, each of whose tokens, but for the first, came with K
    drafts. On a machine so busy that the draft gets no time for seconds, it is taken for dead, and
    rounds do without until it is back."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=TEMPERATURE, max_tokens=SEEDED, ignore_eos=True, detokenize=False, seed=seed
    )
    for _ in range(10):
        wait_for("the draft", lambda: serves(counters(run_dir)), START_S)
        before = counters(run_dir)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        spent = subtract(counters(run_dir), before)
        accepted = spent["accepted"]
        tokens = 1 + sum(length * count for length, count in enumerate(accepted, 1))
        # On a GPU, the text has nothing of the last round, which may find that its request is gone.
        complete = spent["drafts"] == K * sum(accepted) and tokens >= SEEDED
        if complete or spent["drafts"] == K * spent["rounds"]:
            return list(output.outputs[0].token_ids)
    raise AssertionError(f"rounds without drafts: {spent}")


def _sample(llm: Any, cases: dict[str, Case]) -> dict[str, torch.Tensor]:
    """name -> int64 [texts, TOKENS]."""
    from vllm import SamplingParams

    # The first texts of all cases, then the second ones, ..
    names = [
        name
        for number in range(max(case.texts for case in cases.values()))
        for name, case in cases.items()
        if number < case.texts
    ]
    # One token more than are looked at: so that all of these may be drafts.
    common: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": TOKENS + 1}
    common |= {"ignore_eos": True, "detokenize": False}
    outputs = llm.generate(
        [{"prompt_token_ids": list(cases[name].prompt)} for name in names],
        [SamplingParams(**common, **cases[name].settings) for name in names],
        use_tqdm=False,
    )
    found: dict[str, list[list[int]]] = {name: [] for name in cases}
    for name, output in zip(names, outputs):
        text = list(output.outputs[0].token_ids[:TOKENS])
        found[name].append(text + text[-1:] * (TOKENS - len(text)))
    return {name: torch.tensor(texts) for name, texts in found.items()}
