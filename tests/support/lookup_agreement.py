"""Host and device lookup side by side, each with a table of its own and the same random draft."""

import random
from unittest import mock

import torch

from tests.support.chaos import Chaos
from tests.support.control_socket import Sent
from tests.support.fallbacks import certain
from tests.support.guess import continuation, in_vocabulary
from tests.support.lookup_cases import MAX_LEN, SAMPLED, SHAPE, VOCAB, K, Target, beat
from vllm_ssd.table import SpeculationTable
from vllm_ssd.worker.client import UNSEEN, Row, SpeculationClient
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.slots import SlotState
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner, WaitPolicy


def host_and_device_agree(folder, device, seed):
    """Whatever the draft does and whatever is waited for: drafts, what they were sampled from,
    every byte of the slots, and the counters. Prompts have placeholders for images in them, which
    are never proposed."""
    rng = random.Random(seed)
    on_miss = rng.choice(["auto", "wait", "skip"])
    if on_miss != "auto":
        _agree(folder, device, seed, rng, on_miss)
        return
    # What it chooses depends on time: both are given any plans, the same in the same step.
    plan = WaitPlan(0, 0)

    def begin_step():
        nonlocal plan
        plan = WaitPlan(rng.randint(0, K), rng.randint(0, K))

    with mock.patch.object(WaitPlanner, "plan", lambda *_: plan):
        _agree(folder, device, seed, rng, on_miss, begin_step)


def _agree(folder, device, seed, rng, on_miss, begin_step=lambda: None):
    shape = SAMPLED if seed % 2 else SHAPE
    target = Target(folder / "device", device, on_miss=on_miss, shape=shape)
    table = SpeculationTable.create(folder / "host", shape)
    host_sent = Sent()
    host = SpeculationClient(
        Connection(table, host_sent, WaitPolicy(on_miss, 1e-3), VOCAB, MAX_LEN)
    )
    chaos = Chaos(rng, [target.table, table], VOCAB)
    words = rng.choice([4, VOCAB])  # few: texts repeat themselves
    unheard = set()  # slots of whose requests the draft was not told

    def join(slot):
        known = range(words)
        images = [VOCAB, VOCAB + 1, -1] if rng.random() < 0.5 else []
        length = rng.choice([1, 30, 60, MAX_LEN - K - 1])
        text = rng.choices([*known[:4], *images] if images else known, k=length)
        if rng.random() < 0.15:  # as vLLM's warm-up requests, of which the client does not hear
            target.write(slot, text, start=0)
            return
        host_sent.full = target.sent.full = rng.random() < 0.25
        (unheard.add if host_sent.full else unheard.discard)(slot)
        target.add(f"r{slot}", slot, text)
        host._free.sort(key=slot.__eq__)  # it gives away the last of them
        host.add(f"r{slot}", text)
        assert host.slots.states[f"r{slot}"].slot == slot

    for slot in range(SHAPE.slots):
        join(slot)
    for _ in range(24):
        begin_step()
        life = 1000 if rng.random() < 0.8 else -1000
        for each in (target.table, table):
            beat(each, life)
        rows = []
        for slot in rng.sample(range(SHAPE.slots), rng.randint(1, SHAPE.slots)):
            if target.lengths[slot] >= MAX_LEN - K or rng.random() < 0.03:
                target.client.remove(f"r{slot}")
                host.remove(f"r{slot}")
                join(slot)
            sampled = rng.choice([0, 1, 1, 2, K, K + 1])
            gap = rng.choice([0, 0, 0, 0, 1, 9]) if sampled else 0
            gap = min(gap, MAX_LEN - target.lengths[slot] - sampled)
            state = host.slots.states.get(f"r{slot}", SlotState(slot, 0, 0))
            if state.handed_over < len(state.drafts):
                sampled = min(sampled, state.handed_over + 1)  # the others were not verified
            new = [rng.randrange(words) for _ in range(sampled + gap)]
            if state.drafts and rng.random() < 0.3:  # they are right as far as they were verified
                new = list(state.drafts[: rng.randint(1, state.handed_over + 1)])
                new = new[: MAX_LEN - target.lengths[slot]]
                sampled, gap = len(new), 0
            if sampled and state.generation and (slot not in unheard or rng.random() < 0.2):
                accepted = UNSEEN if gap and rng.random() < 0.5 else sampled - 1
                chaos.act(slot, state.generation, state.round, accepted, new[-1])
            target.write(slot, new)
            ours = sampled if state.generation else 0
            rows.append((slot, sampled, ours, max(0, state.handed_over - max(sampled - 1, 0))))
        newest = [target.texts[slot, target.lengths[slot] - 1] for slot, *_ in rows]
        newest = in_vocabulary(newest, VOCAB)
        most = rng.choice([K, K, K, 1, 2])
        draft_probs = certain(torch.tensor([[token] * K for token in newest]), shape.top_m).clone()
        asked = [
            Row(f"r{slot}", target.texts[slot, : target.lengths[slot]], ours)
            for slot, _, ours, _ in rows
            if ours
        ]
        found = iter(host.exchange(asked, len(rows), most_drafts=most))
        expected = []
        for token, (slot, _, ours, _), of_row in zip(newest, rows, draft_probs):
            tokens = next(found) if ours else []
            if tokens:
                probs = host.slots.states[f"r{slot}"].draft_probs[: len(tokens)]
                of_row[: len(tokens)] = torch.from_numpy(probs)
            if ours and not tokens:
                text = target.texts[slot, : target.lengths[slot]]
                tokens = continuation(text.tolist(), K, VOCAB)
                of_row[:] = certain(torch.tensor(tokens), shape.top_m)
            expected.append(tokens + [token] * (K - len(tokens)))
        on_device = torch.full_like(draft_probs, -7, device=device)
        drafts = target.launch([(*row[:2], row[3]) for row in rows], on_device, most).tolist()
        # vLLM does not see those beyond ``most``, which are what is left for the next round.
        assert [row[:most] for row in drafts] == [row[:most] for row in expected]
        assert all(0 <= token < VOCAB for row in drafts for token in row)
        assert torch.equal(on_device.cpu()[:, :most], draft_probs[:, :most])
        assert target.table.slots.tobytes() == table.slots.tobytes()
        for name in table.target.dtype.names:
            if name not in ("started_s", "wait_us", "waits"):
                assert target.counted(name) == table.target[name][0].tolist(), name
    assert host_sent == target.sent
