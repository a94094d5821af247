"""Invariant 5 through the whole engine: a draft that equals its target is always right, and in
time.

The target is a stand-in: the draft's own function at many times its cost. So the draft has all
the time it needs, and every miss, late branch or rejected draft is an error of ours.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from benchmarks.running import counters
from tests.engine.harness import engine, greedy, own_run_dir, texts

K = 3
PROMPTS = [[7, 150, 33, 2, 91, 18], [399, 5, 5, 80], list(range(20, 60))]


def test_every_round_is_a_hit_that_accepts_k(tiny_pair):
    wide, small = tiny_pair
    rounds = 10
    sampling = greedy(1 + rounds * (K + 1), ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    speculation = {"method": "ssd", "k": K, "f": 1, "model": str(small)}
    options = {"skip_tokenizer_init": True, "max_model_len": 256}
    with engine(str(wide), speculative_config=speculation, **options) as llm:
        run_dir = own_run_dir()
        found = [texts(llm.generate([p], sampling, use_tqdm=False))[0] for p in prompts]
        counted = counters(run_dir)
    reference = LlamaForCausalLM.from_pretrained(small).float().eval()
    for prompt, (tokens, _) in zip(PROMPTS, found):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert counted["misses"] == 0
    # The first outcome may come before the draft has read the prompt; it is then answered, and
    # the round after it is ahead again.
    assert counted["late"] <= len(PROMPTS)
    assert counted["hits"] == counted["rounds"] - counted["late"]
    assert counted["timeouts"] == 0
    assert counted["accepted"] == [0] * K + [rounds * len(PROMPTS)]
