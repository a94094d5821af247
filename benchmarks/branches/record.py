"""Records rounds of SmolLM2-135M-Instruct and its draft, for `benchmarks.branches.replay`.

    python -m benchmarks.branches.record --k 7 --temperature 0 --requests 84 --out FILE.npz \
        --questions alpaca.jsonl gsm8k.jsonl

Both models run in float32 on the CPU, without an engine. A round begins after the bonus token of
the round before. Prompts are the benchmark's own passages and the questions of the given files, in
turn. At a temperature, drafts are sampled from the draft's 32 likeliest tokens, as ssd does by
default, and verified with the rule of vLLM's rejection sampler.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.common.prompts import chat_text, make_texts
from benchmarks.standin import ensure_draft, ensure_smollm2

TOP_M = 32  # tokens that a draft is sampled from
CANDIDATES = 17  # bonus tokens recorded at each position: 16 and the draft token
PROMPT_TOKENS = 160


class Pair:
    """Target and draft over a batch of texts. Both keep the KV of the same slots. Slots of tokens
    that are not in a text stay where they are, and `valid` hides them."""

    def __init__(self, models: Sequence[Any], prompts: list[list[int]]):
        self._models = models
        self._caches = [DynamicCache() for _ in models]
        width = max(map(len, prompts)) - 1
        padded = torch.tensor([[0] * (width + 1 - len(row)) + row for row in prompts])
        self.lengths = torch.tensor([len(row) - 1 for row in prompts])
        self.valid = torch.arange(width) >= width - self.lengths.unsqueeze(1)
        self.last = padded[:, -1:]
        positions = (torch.arange(width) - (width - self.lengths.unsqueeze(1))).clamp(min=0)
        for which in range(len(models)):
            self._run(which, padded[:, :-1], self.valid, positions, 1)

    def logits(self, which: int, tokens: torch.Tensor, fed: int) -> torch.Tensor:
        """float32 [rows, new, vocab] after ``tokens``, of which ``fed`` follow the text before."""
        new = tokens.shape[1]
        shown = torch.ones(len(tokens), fed + new, dtype=torch.bool)
        positions = self.lengths.unsqueeze(1) + torch.arange(fed, fed + new)
        return self._run(which, tokens, torch.cat([self.valid, shown], 1), positions, new)

    def _run(
        self, which: int, tokens: torch.Tensor, mask: torch.Tensor, places: torch.Tensor, keep: int
    ) -> torch.Tensor:
        output = self._models[which](
            tokens,
            attention_mask=mask.long(),
            position_ids=places,
            past_key_values=self._caches[which],
            logits_to_keep=keep,
        )
        logits: torch.Tensor = output.logits
        return logits

    def advance(self, accepted: torch.Tensor, bonus: torch.Tensor, k: int) -> None:
        """Append the accepted drafts of the k shown, and the bonus."""
        kept = torch.arange(k + 1) <= accepted.unsqueeze(1)
        self.valid = torch.cat([self.valid, kept], 1)
        self.lengths = self.lengths + accepted + 1
        self.last = bonus.unsqueeze(1)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop the other rows of the batch."""
        for cache in self._caches:
            cache.batch_select_indices(rows)
        self.valid, self.lengths, self.last = self.valid[rows], self.lengths[rows], self.last[rows]


def draw(weights: torch.Tensor) -> torch.Tensor:
    """int64 [...]: a sample of each row of weights."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def play_round(pair: Pair, k: int, temperature: float) -> dict[str, torch.Tensor]:
    """Draft, verify and advance all texts by a round."""
    drafts, chances, candidates, candidate_logprobs = [], [], [], []
    proposed = []  # the distributions that drafts were sampled from
    tokens = pair.last
    for step in range(k + 1):
        logits = pair.logits(1, tokens, step)[:, -1] / (temperature or 1.0)
        logprobs = logits.log_softmax(-1)
        top = logprobs.topk(TOP_M)
        candidates.append(top.indices[:, :CANDIDATES])
        candidate_logprobs.append(top.values[:, :CANDIDATES])
        if step == k:
            break
        weights = top.values.softmax(-1)
        chosen = draw(weights) if temperature else torch.zeros(len(logits), dtype=torch.int64)
        tokens = top.indices.gather(1, chosen.unsqueeze(1))
        drafts.append(tokens)
        chances.append(logprobs.gather(1, tokens))
        proposed.append(torch.zeros_like(logits).scatter_(1, top.indices, weights))
    drafted = torch.cat(drafts, 1)
    logits = pair.logits(0, torch.cat([pair.last, drafted], 1), 0)
    if temperature:
        wanted = (logits / temperature).softmax(-1)
        q = torch.stack(proposed, 1)
        of_draft = drafted.unsqueeze(2)
        ratio = (wanted[:, :k].gather(2, of_draft) / q.gather(2, of_draft)).squeeze(2)
        right = torch.rand(ratio.shape) <= ratio
        sampled, instead = draw(wanted), draw((wanted[:, :k] - q).clamp(min=1e-12))
    else:
        sampled = logits.argmax(-1)
        instead = sampled[:, :k]
        right = instead == drafted
    accepted = right.long().cumprod(1).sum(1)
    replies = torch.cat([instead, sampled[:, k:]], 1)
    bonus = replies.gather(1, accepted.unsqueeze(1)).squeeze(1)
    pair.advance(accepted, bonus, k)
    return {
        "drafts": drafted,
        "logprobs": torch.cat(chances, 1),
        "candidates": torch.stack(candidates, 1),
        "candidate_logprobs": torch.stack(candidate_logprobs, 1),
        "accepted": accepted,
        "bonus": bonus,
        "sampled": sampled,  # the bonus at each position if drafts end there
    }


def record(
    models: Sequence[Any], prompts: list[list[int]], k: int, temperature: float, tokens: int
) -> list[dict[str, np.ndarray]]:
    """Rounds of all prompts until ``tokens`` tokens or the end of the answer."""
    end = models[0].config.eos_token_id
    pair = Pair(models, prompts)
    rows = torch.arange(len(prompts))
    limits = pair.lengths + tokens
    rounds = []
    while len(rows):
        played = play_round(pair, k, temperature)
        rounds.append({"request": rows.numpy()} | {key: v.numpy() for key, v in played.items()})
        ends = (played["drafts"] == end) & (torch.arange(k) < played["accepted"].unsqueeze(1))
        over = ends.any(1) | (played["bonus"] == end) | (pair.lengths >= limits)
        going = (~over).nonzero().squeeze(1)
        rows, limits = rows[going], limits[going]
        pair.keep(going)
    return rounds


def find_prompts(tokenizer: Any, files: Sequence[Path], count: int) -> tuple[list[Any], list[str]]:
    """Prompts as token ids, and the kind of each."""
    kinds = {"passages": make_texts(tokenizer, range(count), PROMPT_TOKENS)}
    for file in files:
        questions = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]
        cut = [tokenizer.decode(tokenizer.encode(text)[:PROMPT_TOKENS]) for text in questions]
        kinds[file.parent.name] = [chat_text(tokenizer, text) for text in cut]
    names = [list(kinds)[number % len(kinds)] for number in range(count)]
    texts = [kinds[name][number // len(kinds)] for number, name in enumerate(names)]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts], names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=84)
    parser.add_argument("--together", type=int, default=28, help="requests of a batch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer, at most")
    parser.add_argument("--questions", type=Path, nargs="*", default=[], metavar="FILE.jsonl")
    parser.add_argument("--models", type=Path, default=Path(".models"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    target = ensure_smollm2(args.models)
    folders = target, ensure_draft(args.models)
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders]
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts, kinds = find_prompts(tokenizer, args.questions, args.requests)
    rounds: list[dict[str, np.ndarray]] = []
    for first in range(0, len(prompts), args.together):
        some = prompts[first : first + args.together]
        with torch.inference_mode():
            for new in record(models, some, args.k, args.temperature, args.tokens):
                rounds.append(new | {"request": new["request"] + first})
        columns = {key: np.concatenate([r[key] for r in rounds]) for key in rounds[0]}
        np.savez_compressed(args.out, kinds=np.array(kinds), **columns)
        mean = columns["accepted"].mean() + 1
        print(f"{len(columns['request'])} rounds, {mean:.2f} tokens a round", flush=True)


if __name__ == "__main__":
    main()
