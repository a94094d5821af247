"""What verify steps cost, and what of vLLM's adaptive verification is prepared at start-up."""

import random
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks import verification
from vllm_ssd.hooks.runner_v2 import SPECULATOR
from vllm_ssd.hooks.verification import OwnManager, with_own_manager

ROWS, K = 64, 5
KV_MS, STEP_MS, TOKEN_MS = 0.001, 20.0, 0.25


class Copied:
    """Confidences on the device, and their copy on the host."""

    def __init__(self):
        self.gpu = torch.ones(ROWS, K)
        self.np = np.full((ROWS, K), 0.7, np.float32)

    def copy_to_cpu(self):
        self.np[:] = self.gpu.numpy()


class Manager(OwnManager):
    """Ours, without vLLM's streams and events, which need a GPU."""

    def __init__(self):
        device = torch.device("cpu")
        self.req_states = SimpleNamespace(
            max_num_reqs=ROWS,
            max_model_len=1000,
            max_num_batched_tokens=512,
            num_speculative_steps=K,
            device=device,
            req_id_to_index={f"r{slot}": slot for slot in range(ROWS)},
            num_computed_tokens_np=np.zeros(ROWS, np.int32),
            prefill_len=SimpleNamespace(np=np.zeros(ROWS, np.int32)),
        )
        self.num_speculative_steps, self.num_bonus_tokens = K, 1
        self._max_total_logits = 10_000
        self._batch_draft_capacity = torch.empty(ROWS, dtype=torch.int32)
        self._confidence_probs = torch.rand(ROWS, K)
        self._expected = torch.ones(ROWS, K)
        self._stale_confidences = [Copied(), Copied()]
        self._stale_idx = 0
        self._pending_resets = []
        self._copy_events = [SimpleNamespace(synchronize=int, record=int)] * 2
        self._copy_stream = SimpleNamespace(wait_stream=lambda stream: None)
        self._batch_budget = None

    def set_cost_curves(self, draft_curve, verify_curve):
        """Without vLLM's group of ranks."""
        self.cost_tables = adaptive_verification.build_cost_tables_from_curves(
            draft_curve, verify_curve, ROWS, 512, self._cudagraph_limit
        )


def measured(manager):
    """What the profiled steps would take on a device with the costs above."""
    samples = []
    for batch in Manager.batches_to_profile(manager, [1, 8, 16, 64, 128]):
        tokens = batch["num_tokens"]
        requests = min(tokens, ROWS)
        kv = requests * batch["context_len"]
        ms = STEP_MS + TOKEN_MS * tokens + KV_MS * kv
        samples.append(StepTimingSample(ms, 0.01, tokens, requests, True))
    return samples


@pytest.fixture
def manager(monkeypatch):
    """One that has taken in what was measured."""
    alone = SimpleNamespace(broadcast_object=lambda value, src: value)
    monkeypatch.setattr(verification, "get_tp_group", lambda: alone)
    monkeypatch.setattr(verification, "compile_trimming", lambda manager: None)
    manager = Manager()
    manager.set_initial_cost_curves(measured(manager))
    return manager


def budget(manager, requests):
    """The number of drafts that are to be verified, of K for each request."""
    drafts = {f"r{slot}": [0] * K for slot in range(requests)}
    return manager.get_num_tokens(dict.fromkeys(drafts, K + 1), drafts) - requests


def test_tokens_are_measured_without_kv(manager):
    costs = manager.cost_tables[1]
    assert costs[8] == pytest.approx(STEP_MS + 8 * TOKEN_MS)
    assert costs[128] == pytest.approx(STEP_MS + 128 * TOKEN_MS)


def test_a_steps_kv_is_part_of_its_cost(manager):
    """The longer a step takes anyway, the more drafts pay."""
    few = budget(manager, 16)
    assert manager.cost_tables[0][16] == 0.0
    manager.req_states.num_computed_tokens_np[:16] = 5000
    many = budget(manager, 16)
    assert manager.cost_tables[0][16] == pytest.approx(16 * 5000 * KV_MS)
    assert 0 < few < many <= 16 * K


def test_only_engines_with_ssd_have_it():
    def refuse(**kwargs):
        raise ValueError("not with this attention")

    config = SimpleNamespace(speculative_config=SSDConfig(k=2))

    def make(**kwargs):
        manager = AdaptiveVerificationManager.__new__(AdaptiveVerificationManager)
        manager._confidence_probs = torch.empty(ROWS, K)
        return manager

    assert isinstance(with_own_manager(make, vllm_config=config), OwnManager)
    assert with_own_manager(refuse, vllm_config=config) is None
    config.speculative_config = SSDConfig(k=2, enable_adaptive_verification=True)
    with pytest.raises(ValueError, match="not with this"):
        with_own_manager(refuse, vllm_config=config)
    config.speculative_config = None
    assert type(with_own_manager(make, vllm_config=config)) is AdaptiveVerificationManager
    with pytest.raises(ValueError, match="not with this"):
        with_own_manager(refuse, vllm_config=config)


def test_trimming_is_compiled_once(monkeypatch):
    """Else the first answers that are trimmed have a gap of 0.3 seconds."""
    compiled = torch.compile(
        adaptive_verification._assign_draft_token_budget, dynamic=True, backend="aot_eager"
    )
    monkeypatch.setattr(adaptive_verification, "_assign_draft_token_budget_compiled", compiled)
    manager = Manager()
    with torch.inference_mode():
        verification.compile_trimming(manager)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows, drafts in [(1, 1), (1, 4), (2, 1), (2, 7), (3, 3), (16, 40), (64, 64)]:
                capacities = manager._batch_draft_capacity[:rows].fill_(K)
                slots = torch.arange(rows)
                compiled(manager._confidence_probs, slots, capacities, drafts, K)
                assert capacities.sum() == drafts


@pytest.mark.parametrize("by_drawn_token, changes", [(False, False), (True, True)])
def test_what_is_verified_does_not_follow_from_what_was_drawn(by_drawn_token, changes):
    """Whether vLLM verifies a token may follow from the tokens before it and from other rows. Were
    a token's chance that of the drawn token, and not the largest one at its place, it would also
    follow from the token itself, and texts would get another distribution."""
    first, second = (0.6, 0.4), ((0.95, 0.05), (0.45, 0.55))
    verified: dict[tuple[int, ...], set[bool]] = {}
    for drawn in product((0, 1), repeat=4):  # two rows of two tokens each
        rows = torch.tensor(drawn).view(2, 2)
        of_tokens = [[first[a], second[a][b]] for a, b in rows.tolist()]
        of_places = [[max(first), max(second[a])] for a, _ in rows.tolist()]
        chances = torch.tensor(of_tokens if by_drawn_token else of_places)
        counts = torch.full((2,), 2, dtype=torch.int32)
        adaptive_verification._assign_draft_token_budget(chances, torch.arange(2), counts, 2, 2)
        for row, place in product(range(2), range(2)):
            before = row, place, *drawn[2 * row : 2 * row + place], *rows[1 - row].tolist()
            verified.setdefault(before, set()).add(bool(counts[row] > place))
    assert any(len(found) > 1 for found in verified.values()) == changes


@pytest.fixture
def without_streams(monkeypatch):
    monkeypatch.setattr(adaptive_verification, "gpu_sync_allowed", nullcontext)
    monkeypatch.setattr(adaptive_verification, "stream", lambda *streams: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


def budgets(pending, seed):
    """The number of draft tokens to verify, step by step, and what is then known of their chances.
    Rows come, end and miss steps at random. pending: the chance of all pending draft tokens."""
    manager, rng, found = Manager(), random.Random(seed), []
    steps = np.repeat(np.arange(1.0, 40.0), 8) + 10
    manager.cost_tables = np.zeros(ROWS + 1), steps  # as recorded graphs cost
    ours = SimpleNamespace(has_proposed=True)
    setattr(manager.req_states, SPECULATOR, ours)
    for _ in range(12):
        for slot in range(4):
            if rng.random() < 0.2:
                manager.add_request(slot)  # of a new request
        rows = rng.sample(range(4), rng.randint(1, 4))
        ours.has_proposed = rng.random() < 0.8
        ours.expected_confidence_probs = torch.full((4, K), rng.random())
        ours.draft_token_confidence_probs = torch.full((4, K), pending)
        scheduled = {f"r{slot}": [0] * K for slot in rows}
        tokens = manager.get_num_tokens(dict.fromkeys(scheduled, K + 1), scheduled)
        batch = SimpleNamespace(num_reqs=len(rows), idx_mapping=torch.tensor(rows))
        before = manager._stale_idx
        manager.record_confidences(None, batch)
        if ours.has_proposed:
            assert (manager._confidence_probs[rows] == pending).all(), "which rank the tokens"
        else:
            assert manager._stale_idx == before, "nothing to record, and nothing is waited for"
        found.append((tokens, manager._stale_confidences[manager._stale_idx].np[:4].tolist()))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_number_to_verify_does_not_follow_from_pending_drafts(without_streams, seed):
    """Their chances follow from the tokens drawn before them. If these decided how many tokens of
    the same row are verified, texts would get another distribution. They would if a row missed two
    steps, because vLLM copies the chances of all rows to the host."""
    low, high = budgets(0.05, seed), budgets(0.95, seed)
    assert low == high
    assert len({tokens for tokens, _ in low}) > 1


def test_a_new_request_is_expected_to_accept_until_more_is_known(without_streams):
    manager = Manager()
    expected = torch.full((1, K), 0.3)
    ours = SimpleNamespace(
        has_proposed=True, expected_confidence_probs=expected, draft_token_confidence_probs=expected
    )
    setattr(manager.req_states, SPECULATOR, ours)
    steps = [SimpleNamespace(num_reqs=1, idx_mapping=torch.tensor([slot])) for slot in (0, 1)]
    for slot in (0, 1, 1):
        manager.record_confidences(None, steps[slot])
    manager.add_request(0)  # in the slot of one that has ended; it misses the next steps
    for _ in range(3):
        assert (manager._stale_confidences[manager._stale_idx].np[0] == 1).all()
        manager.record_confidences(None, steps[1])
    assert (manager._confidence_probs[0] == 1).all()
