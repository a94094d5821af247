"""Invariant 3: whatever the draft does, texts have the target's distribution.

A target and a draft of a few tokens that meet in a real table, many requests at once.

Both are Markov chains. Real are: choosing outcomes, sampling drafts, publishing, looking up, and
both forms in which vLLM gets the distributions. What is played: when the draft is late or wrong,
and vLLM's rejection sampler, whose definition (arXiv 2211.17192) is short.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from tests.support.branch_tokens import alike
from tests.support.chi_square import chance_of
from tests.support.fallbacks import certain
from vllm_ssd.draft.fan_out import choose
from vllm_ssd.draft.sampling import Sampler
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.vocabulary import SharedVocabulary
from vllm_ssd.table import SpeculationTable, TableShape, make_stamp
from vllm_ssd.table.predictions import PredictionReader
from vllm_ssd.table.publisher import HostPublisher, PredictedOutcomes
from vllm_ssd.worker.dense_probs import DraftLogits, dense

VOCAB, K, F, SLOTS, TOKENS = 6, 3, 2, 256, 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scene:
    """miss: share of outcomes that were not predicted; depth: drafts that are ready, None = any
    number; lie: report what would have been sampled from without Saguaro. translated: the draft has
    another vocabulary, without one of the target's tokens."""

    top_m: int = 0
    saguaro: float = 1.0
    temperature: float = 0.8
    top_k: int = VOCAB
    top_p: float = 1.0
    miss: float = 0.0
    depth: int | None = K
    lie: bool = False
    translated: bool = False


def cut(logits, top_k, top_p):
    """Probabilities of what vLLM's top-k and top-p leave."""
    k, p = torch.full((len(logits),), top_k), torch.full((len(logits),), top_p)
    return apply_top_k_top_p_pytorch(logits.clone(), k, p).softmax(-1)


class Play:
    """``episode``: the first tokens of as many texts as there are slots."""

    def __init__(self, path, scene, seed=0):
        self.scene = scene
        self.rng = torch.Generator().manual_seed(seed)
        self.draft_rng = torch.Generator().manual_seed(seed + 1)
        start = torch.Generator().manual_seed(7)
        # [last token] -> logits of the next
        target = 1.5 * torch.randn(VOCAB, VOCAB, generator=start)
        self.q = target + 0.9 * torch.randn(VOCAB, VOCAB, generator=start)
        if scene.translated:
            # The draft reads token 2 as one that only the draft has.
            shared = SharedVocabulary([4, 7, ~5, 0, 3, 6], CPU)
            own = 1.5 * torch.randn(8, 8, generator=start)
            both, ids = torch.tensor([0, 1, 3, 4, 5]), torch.tensor([4, 7, 0, 3, 6])
            own[ids[:, None], ids] = self.q[both[:, None], both]
            self.q = shared.logits(own[shared.read(torch.arange(VOCAB))])
        self.p = cut(target / scene.temperature, scene.top_k, scene.top_p)
        policy = DraftPolicy(K, F, False, 16, top_m=scene.top_m, saguaro=scene.saguaro)
        shape = TableShape(SLOTS, K, policy.branches, tail=16, top_m=scene.top_m)
        table = SpeculationTable.create(path, shape)
        self.publisher = HostPublisher()
        self.where = torch.tensor(self.publisher.join(table))
        self.predictions = PredictionReader(table, VOCAB)
        if scene.top_m:
            self.sampler = Sampler(policy, CPU)
            self.honest = Sampler(replace(policy, saguaro=1.0), CPU)
        self.width = max(scene.top_m, 1)
        self.logits = DraftLogits(SLOTS, K, self.width, VOCAB, CPU)
        self.slots = torch.arange(SLOTS)
        self.round = 0
        self.verified = self.accepted = self.hits = 0

    def exact(self):
        """Probabilities of all texts of TOKENS tokens, as one row."""
        probs = self.p[:1]
        for _ in range(TOKENS - 1):
            probs = (probs.unsqueeze(-1) * self.p).view(-1, VOCAB)
        return probs.view(-1)

    def episode(self):
        """int64 [SLOTS, TOKENS]; the text before is token 0."""
        last = torch.zeros(SLOTS, dtype=torch.int64)
        texts = [[] for _ in range(SLOTS)]
        drafts, count = torch.zeros(SLOTS, K, dtype=torch.int64), torch.zeros(SLOTS)
        q = torch.zeros(SLOTS, K, VOCAB)
        for number in range(TOKENS):
            if number < TOKENS - 1:
                self._draft(last, drafts, count)
            accepted, bonus = self._verify(last, drafts, count, q)
            for text, n, some, token in zip(texts, accepted, drafts.tolist(), bonus.tolist()):
                text += [*some[:n], token]
            last = bonus
            if number < TOKENS - 1:
                drafts, count, q = self._look_up(accepted, bonus)
            self.round += 1
        return torch.tensor([text[:TOKENS] for text in texts])

    def _draft(self, last, drafts, count):
        """Predict outcomes of the round and grow a branch for each, all independent of it."""
        rows = torch.cat([last.unsqueeze(1), drafts], dim=1)
        ruled_out = torch.cat([drafts, torch.full((SLOTS, 1), -1)], dim=1)
        ruled_out = ruled_out.where(torch.arange(K + 1) < count.unsqueeze(1), -1)
        each = torch.arange((K + 1) * SLOTS).repeat_interleave(F)
        ranks = torch.arange(F).repeat((K + 1) * SLOTS)
        logits = self.q[rows].view(-1, VOCAB)
        last_tokens = choose(logits, ruled_out.reshape(-1), each, ranks, F)
        accepted = torch.arange(K + 1).repeat_interleave(F).repeat(SLOTS, 1)
        stamps = torch.full((SLOTS,), int(make_stamp(1, self.round)))
        forgotten = torch.rand(SLOTS, generator=self.draft_rng) < self.scene.miss
        accepted[forgotten] = K + 1
        bonus = last_tokens.view(SLOTS, -1)
        self.publisher.predict(PredictedOutcomes(self.where, stamps, accepted, bonus))
        depth = self.scene.depth
        if depth is None:
            depth = int(torch.randint(K + 1, (1,), generator=self.draft_rng))
        for step in range(depth):
            last_tokens, draft_probs = self._grow(last_tokens, step)
            each = last_tokens.view(SLOTS, -1)
            certain = torch.ones(each.shape)
            self.publisher.extend(alike(self.where, stamps, each, certain, step, draft_probs))

    def _grow(self, last_tokens, step):
        logits, rows = self.q[last_tokens], len(last_tokens)
        if not self.scene.top_m:
            return logits.argmax(-1), None
        uniforms = torch.rand(rows, K, generator=self.draft_rng, dtype=torch.float64)
        temperatures = torch.full((rows,), self.scene.temperature, dtype=torch.float64)
        at = torch.full((rows,), step)
        tokens, _, draft_probs = self.sampler.sample(logits, temperatures, uniforms, at)
        if self.scene.lie:
            *_, draft_probs = self.honest.sample(logits, temperatures, uniforms, at)
        return tokens, draft_probs.view(SLOTS, -1, self.width)

    def _verify(self, last, drafts, count, q):
        """The rejection sampler: accepted drafts, list of SLOTS, and the token after them."""
        before = torch.cat([last.unsqueeze(1), drafts], dim=1)
        p = self.p[before]  # [slots, k + 1, vocab]
        drafted = drafts.unsqueeze(2)
        ratio = p[:, :K].gather(2, drafted) / q.gather(2, drafted).clamp(min=1e-30)
        kept = torch.rand(SLOTS, K, generator=self.rng) < ratio.squeeze(2)
        kept &= torch.arange(K) < count.unsqueeze(1)
        stop = kept.long().cumprod(dim=1).sum(dim=1)
        residual = torch.cat([(p[:, :K] - q).clamp(min=0), p[:, K:]], dim=1)
        probs = residual.where((torch.arange(K + 1) < count.unsqueeze(1)).unsqueeze(2), p)
        bonus = torch.multinomial(probs[self.slots, stop], 1, generator=self.rng).squeeze(1)
        accepted = stop.tolist()
        self.verified += int(count.sum())
        self.accepted += sum(accepted)
        return accepted, bonus

    def _look_up(self, accepted, bonus):
        drafts, counts = bonus.unsqueeze(1).repeat(1, K), []
        results = [
            self.predictions.find(slot, make_stamp(1, self.round), n, token)
            for slot, (n, token) in enumerate(zip(accepted, bonus.tolist()))
        ]
        for result, row in zip(results, drafts.numpy()):
            row[: len(result.tokens)] = result.tokens
            counts.append(len(result.tokens))
            self.hits += result.predicted
        count = torch.tensor(counts)
        draft_probs = certain(drafts, self.width).clone()
        if self.scene.top_m:
            for result, of_row in zip(results, draft_probs.numpy()):
                of_row[: len(result.tokens)] = result.draft_probs
        temperatures = torch.full((SLOTS,), self.scene.temperature)
        self.logits.update(self.slots, draft_probs, temperatures)
        q = (self.logits.logits / self.scene.temperature).softmax(-1)
        torch.testing.assert_close(q, dense(draft_probs, VOCAB), rtol=1e-5, atol=1e-6)
        return drafts, count, q


EPISODES = 16
SCENES = {
    "greedy, misses, late": Scene(miss=0.3, depth=None),
    "greedy, top-k and top-p": Scene(top_k=4, top_p=0.8),
    "probabilistic, truncated": Scene(top_m=3),
    "probabilistic, one token, top-k and top-p": Scene(top_m=1, top_k=4, top_p=0.8),
    "probabilistic, misses, late": Scene(top_m=VOCAB, miss=0.3, depth=None),
    "another vocabulary": Scene(translated=True, depth=None),
    "another vocabulary, probabilistic": Scene(top_m=VOCAB, translated=True, miss=0.3),
    "another vocabulary, Saguaro": Scene(top_m=3, saguaro=0.3, translated=True),
    "Saguaro": Scene(top_m=4, saguaro=0.3),
    "Saguaro, misses, late, top-k and top-p": Scene(4, 0.3, 1.2, 5, 0.9, miss=0.2, depth=None),
}


def p_value(play):
    texts = torch.cat([play.episode() for _ in range(EPISODES)])
    assert len(texts) == EPISODES * SLOTS
    assert play.verified > len(texts) // 4, "few drafts were verified"
    return chance_of(texts, VOCAB, play.exact())


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_texts_have_the_targets_distribution(tmp_path, scene):
    play = Play(tmp_path / "t", scene)
    assert p_value(play) > 1e-3
    assert play.accepted > play.verified / 5


def test_a_wrong_report_is_detected(tmp_path):
    """Saguaro sampling that reports the probabilities it has not lowered."""
    play = Play(tmp_path / "t", Scene(top_m=4, saguaro=0.3, lie=True))
    assert p_value(play) < 1e-9


def test_saguaro_hits_more(tmp_path):
    plain, saguaro = (Play(tmp_path / str(c), Scene(top_m=VOCAB, saguaro=c)) for c in (1.0, 0.2))
    for _ in range(EPISODES):
        plain.episode()
        saguaro.episode()
    assert saguaro.hits > plain.hits
