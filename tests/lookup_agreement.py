"""Host and device lookup side by side, each with a table of its own and the same random draft."""

import random

import numpy as np
import torch

from tests.control_socket import Sent
from tests.lookup_cases import MAX_LEN, SAMPLED, SHAPE, VOCAB, K, Target, beat
from vllm_ssd.draft.publish import DraftMailbox
from vllm_ssd.proposals import certain, pack
from vllm_ssd.table import DRAFTING, GIVEN_UP, PREPARING, SpeculationTable, make_stamp
from vllm_ssd.target.client import UNSEEN, Row, SpeculationClient
from vllm_ssd.target.guess import continuation
from vllm_ssd.target.patience import WaitPolicy
from vllm_ssd.target.yields import Depths


class Chaos:
    """A draft that is right, wrong, late, silent or broken, alike in several tables."""

    def __init__(self, chance, tables):
        self.chance = chance
        self.tables = tables
        self.top_m = tables[0].shape.top_m
        self.mailboxes = [DraftMailbox(table) for table in tables]

    def _tokens(self, count):
        return [self.chance.randrange(VOCAB) for _ in range(count)]

    def _entries(self, drafts):
        """What these may have been sampled from."""
        if not self.top_m:
            return None
        tokens = [[draft, *self._tokens(self.top_m - 1)] for draft in drafts]
        shares = torch.tensor([[self.chance.random() for _ in range(self.top_m)] for _ in drafts])
        return pack(torch.tensor(tokens), shares / shares.sum(-1, keepdim=True)).numpy()

    def act(self, slot, generation, round_, accepted, bonus):
        """Do something about the round whose outcome will be ``(accepted, bonus)``."""
        chance = self.chance
        other = (generation + chance.choice([-1, 0, 1]), max(0, round_ + chance.choice([-2, 0, 2])))
        stamp = make_stamp(*(other if chance.random() < 0.2 else (generation, round_)))
        if chance.random() < 0.7:
            self._predict(slot, stamp, accepted, bonus)
        if chance.random() < 0.4:
            reply = self._tokens(chance.randint(0, K))
            entries = self._entries(reply) if reply else None
            for mailbox in self.mailboxes:
                mailbox.publish_answer(slot, stamp, reply, entries=entries)
        if chance.random() < 0.3:
            said = (generation + chance.choice([0, 0, 1]), chance.choice([DRAFTING, GIVEN_UP]))
            for mailbox in self.mailboxes:
                mailbox.set_state(slot, *said)
        elif chance.random() < 0.3:
            for mailbox in self.mailboxes:
                mailbox.set_state(slot, generation, PREPARING)
        if chance.random() < 0.2:
            self._damage(slot, round_ & 1)
        if chance.random() < 0.1:
            self._scribble(slot)

    def _predict(self, slot, stamp, accepted, bonus):
        chance = self.chance
        outcomes = [(chance.randint(0, K), chance.randrange(VOCAB)) for _ in range(SHAPE.branches)]
        if chance.random() < 0.8:
            outcomes[chance.randrange(SHAPE.branches)] = (accepted, bonus)
        if chance.random() < 0.2:
            outcomes[-1] = (accepted, bonus)  # twice: the first one counts
        outcomes = outcomes[: chance.randint(1, SHAPE.branches)]
        count = len(outcomes)
        columns = [self._tokens(count) for _ in range(chance.randint(0, K))]
        entries_of = [self._entries(tokens) for tokens in columns]
        for mailbox in self.mailboxes:
            mailbox.publish_prediction(slot, stamp, *zip(*outcomes))
            for tokens, entries in zip(columns, entries_of):
                mailbox.extend_prediction(slot, stamp, tokens, entries)

    def _damage(self, slot, parity):
        number = self.chance.choice([-1, -(2**31), 2**31 - 1, VOCAB, 0, K, K + 1])
        record = self.chance.choice(["prediction", "answer"])
        field = self.chance.choice(["depth", "tokens", "stamp", *["proposals"] * bool(self.top_m)])
        if field == "proposals":
            number = self.chance.choice([-1, VOCAB, 0x7FC00000 << 32, 0x40000000 << 32, 5])
        if record == "prediction" and self.chance.random() < 0.3:
            field = "count"
        place = self.chance.randrange(K)
        for table in self.tables:
            damaged = table.slots[slot][record][parity : parity + 1][field]
            damaged.flat[place if field in ("tokens", "proposals") else 0] = np.array(
                number % 2**64, np.uint64
            ).astype(damaged.dtype)

    def _scribble(self, slot):
        """Random bytes anywhere in what the draft says of a slot."""
        first = self.tables[0].slots.dtype.fields["state"][1]
        size = self.tables[0].slots.itemsize
        start = self.chance.randrange(first, size)
        noise = self.chance.randbytes(min(self.chance.choice([1, 4, 64]), size - start))
        for table in self.tables:
            of_slot = table.slots[slot : slot + 1].view(np.uint8)
            of_slot[start : start + len(noise)] = np.frombuffer(noise, np.uint8)


def host_and_device_agree(folder, device, seed):
    """Whatever the draft does: drafts, what they were sampled from, every byte of the slots, and
    the counters."""
    chance = random.Random(seed)
    shape = SAMPLED if seed % 2 else SHAPE
    on_miss = chance.choice(["auto", "wait", "skip"])
    rules = {"on_miss": on_miss, "min_depth": chance.randint(1, K)}
    target = Target(folder / "device", device, shape=shape, **rules)
    table = SpeculationTable.create(folder / "host", shape)
    policy = WaitPolicy(rules["on_miss"], rules["min_depth"], 1e-3)
    host_sent = Sent()
    host = SpeculationClient(table, host_sent, policy, VOCAB, MAX_LEN)
    if on_miss == "auto":  # what it decides depends on time
        depths = Depths(0, 0)
        host._patience.decide = target.client._patience.decide = lambda _: depths
    chaos = Chaos(chance, [target.table, table])
    words = chance.choice([4, VOCAB])  # few: texts repeat themselves

    def join(slot):
        text = [chance.randrange(words) for _ in range(chance.randint(1, 60))]
        host_sent.full = target.sent.full = chance.random() < 0.1
        target.add(f"r{slot}", slot, text)
        host.add(f"r{slot}", text)
        assert host._seats[f"r{slot}"].slot == slot

    for slot in range(SHAPE.slots):
        join(slot)
    for _ in range(24):
        depths = Depths(chance.randint(0, K), chance.randint(0, K))
        life = 1000 if chance.random() < 0.8 else -1000
        for each in (target.table, table):
            beat(each, life)
        rows = []
        for slot in chance.sample(range(SHAPE.slots), chance.randint(1, SHAPE.slots)):
            if target.lengths[slot] >= MAX_LEN - K:
                target.client.remove(f"r{slot}")
                host.remove(f"r{slot}")
                join(slot)
            sampled = chance.choice([0, 1, 1, 2, K, K + 1])
            gap = chance.choice([0, 0, 0, 0, 1, 9]) if sampled else 0
            gap = min(gap, MAX_LEN - target.lengths[slot] - sampled)
            new = [chance.randrange(words) for _ in range(sampled + gap)]
            seat = host._seats[f"r{slot}"]
            if sampled:
                accepted = UNSEEN if gap and chance.random() < 0.5 else sampled - 1
                chaos.act(slot, seat.generation, seat.round, accepted, new[-1])
            target.write(slot, new)
            rows.append((slot, sampled))
        newest = [int(target.texts[slot, target.lengths[slot] - 1]) for slot, _ in rows]
        entries = certain(torch.tensor([[token] * K for token in newest]), shape.top_m).clone()
        found = iter(
            host.exchange(
                [
                    Row(f"r{slot}", target.texts[slot, : target.lengths[slot]], sampled)
                    for slot, sampled in rows
                    if sampled
                ],
                len(rows),
                [of_row.numpy() for of_row, (_, sampled) in zip(entries, rows) if sampled],
            )
        )
        expected = []
        for token, (slot, sampled), of_row in zip(newest, rows, entries):
            tokens = next(found) if sampled else []
            if sampled and not tokens:
                tokens = continuation(target.texts[slot, : target.lengths[slot]], K).tolist()
                of_row[:] = certain(torch.tensor(tokens), shape.top_m)
            expected.append(tokens + [token] * (K - len(tokens)))
        if shape.top_m:
            drafts, on_device = target.sampled_step(rows)
            assert drafts == expected
            assert torch.equal(on_device, entries)
        else:
            assert target.step(rows) == expected
        assert target.table.slots.tobytes() == table.slots.tobytes()
        for name in table.target.dtype.names:
            if name not in ("started_s", "wait_us"):
                assert target.counted(name) == table.target[name][0].tolist(), name
    assert host_sent == target.sent
