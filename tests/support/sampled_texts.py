"""Sampled texts of a whole engine against the target's exact distribution.

Target and draft are different random functions of a few tokens, so that drafts are accepted and
rejected alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.common.running import counters
from benchmarks.standin.tiny import tiny_llama
from tests.support.chi_square import chance_of
from tests.support.harness import engine, own_run_dir

VOCAB, TOKENS, TEXTS, K = 6, 3, 2000, 3
PROMPT = [1, 5, 0, 2, 3]
TEMPERATURE = 0.8
# What is sampled from: temperature only; and what top-k and top-p leave of it.
CUTS: list[dict[str, float]] = [{}, {"top_k": 4, "top_p": 0.85}]


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
    with torch.no_grad():
        model.lm_head.weight += 0.06 * torch.randn_like(model.lm_head.weight)
    model.save_pretrained(draft)
    return target, draft


def exact(target: Path, cut: dict[str, float]) -> torch.Tensor:
    """Probabilities of all texts of TOKENS tokens after the prompt, [VOCAB ** TOKENS]."""
    model = LlamaForCausalLM.from_pretrained(target).float().eval()
    texts, probs = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(TOKENS):
        with torch.inference_mode():
            logits = model(texts).logits[:, -1].double() / TEMPERATURE
        if cut:
            ordered, tokens = logits.sort(dim=-1, descending=True)
            ordered[:, int(cut["top_k"]) :] = float("-inf")
            share = ordered.softmax(-1)
            ordered[share.cumsum(-1) - share >= cut["top_p"]] = float("-inf")
            logits = torch.empty_like(logits).scatter_(1, tokens, ordered)
        probs = (probs.unsqueeze(1) * logits.softmax(-1)).view(-1)
        texts = torch.cat(
            [texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts)).view(-1, 1)],
            dim=1,
        )
    return probs


def check(pair: tuple[Path, Path], method: dict[str, Any], **options: Any) -> None:
    """One engine, with a method of drafting: enough texts to see a wrong distribution."""
    from vllm import SamplingParams

    target, draft = pair
    speculation = {"method": "ssd", "k": K, "f": 1, "model": str(draft), "on_miss": "wait"}
    options = {**options, "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 64}
    speculation |= {"max_wait_ms": 200, **method}
    with engine(str(target), speculative_config=speculation, **options) as llm:
        run_dir = own_run_dir()
        for cut in CUTS:
            # One token more than are looked at: so that all of these may be drafts.
            sampling = SamplingParams(
                temperature=TEMPERATURE,
                max_tokens=TOKENS + 1,
                ignore_eos=True,
                detokenize=False,
                **cut,
            )
            prompts = [{"prompt_token_ids": PROMPT}] * TEXTS
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            texts = torch.tensor([o.outputs[0].token_ids[:TOKENS] for o in outputs])
            chance = chance_of(texts, VOCAB, exact(target, cut))
            assert chance > 1e-4, f"{cut}: {chance}"
        counted = counters(run_dir)
    assert sum(counted["accepted"][1:]) > TEXTS / 4, "few drafts were accepted"
    assert counted["accepted"][0] > TEXTS / 4, "few drafts were rejected"
