"""All requests of a draft engine: their phases, KV memory and seats, and their states in the
tables."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence

from vllm_ssd.draft.kv_blocks import BlockPool, BlockTable
from vllm_ssd.draft.model import BLOCK_SIZE, DraftModel
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, GIVEN_UP, PREPARING


class DraftRequests:
    """Iterating gives the requests of all tables, in the order in which they came. seats: the most
    requests that have KV memory at a time."""

    def __init__(self, model: DraftModel, policy: DraftPolicy, seats: int):
        self._policy = policy
        self.pool = BlockPool(model.num_blocks, BLOCK_SIZE)
        # Tokens of the longest text that fits the draft's positions and its whole KV memory.
        self._longest = min(
            model.max_len - 2 * policy.k - 1, model.num_blocks * BLOCK_SIZE - policy.scratch
        )
        self._seats = seats
        self._free_seats = list(range(seats))
        self._by_slot: dict[tuple[ServedTable, int], DraftRequest] = {}
        # Values mean nothing: the keys are an ordered set.
        self._by_phase: dict[Phase, dict[DraftRequest, None]] = {phase: {} for phase in Phase}

    def __len__(self) -> int:
        return len(self._by_slot)

    def __iter__(self) -> Iterator[DraftRequest]:
        return iter(self._by_slot.values())

    def get(self, served: ServedTable, slot: int) -> DraftRequest | None:
        """The request that has this slot."""
        return self._by_slot.get((served, slot))

    # Phases

    def waiting(self, phase: Phase) -> Collection[DraftRequest]:
        """All requests in this phase, in the order in which they entered it."""
        return self._by_phase[phase].keys()

    def at_work(self, phase: Phase) -> list[DraftRequest]:
        """The requests in this phase that the draft works for: they have KV memory and a seat, and
        their target does not do without drafts."""
        return [r for r in self._by_phase[phase] if r.seat >= 0 and not r.served.idle]

    def enter(self, request: DraftRequest, phase: Phase) -> None:
        """Move a request to another phase."""
        del self._by_phase[request.phase][request]
        request.phase = phase
        self._by_phase[phase][request] = None

    def await_outcome(self, request: DraftRequest) -> None:
        """Record that the model has seen all of the request's text and drafts."""
        self.enter(request, Phase.IDLE)
        request.publish_state(DRAFTING)

    # Arrival and departure

    def add(
        self,
        served: ServedTable,
        slot: int,
        generation: int,
        tokens: Sequence[int],
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Give a slot to a new request. The request that had the slot before is dropped."""
        former = self.get(served, slot)
        if former is not None:
            self.drop(former)
        temperature = temperature if self._policy.top_m else 0.0
        text, table = list(tokens), BlockTable(self.pool)
        request = DraftRequest(served, slot, generation, text, table, temperature, seed)
        self._by_slot[served, slot] = request
        self._by_phase[request.phase][request] = None
        self._count(served, 1)
        request.publish_state(PREPARING)
        self.check_size(request)

    def remove(self, served: ServedTable, slot: int, generation: int) -> None:
        """Forget a request, unless another one has its slot already. The target's GPU may still
        have a step of it to run; GIVEN_UP keeps that step from waiting."""
        request = self.get(served, slot)
        if request is not None and request.generation == generation:
            self.drop(request, GIVEN_UP)

    def drop(self, request: DraftRequest, state: int = PREPARING) -> None:
        """Forget a request, and publish ``state`` for it."""
        del self._by_slot[request.served, request.slot]
        del self._by_phase[request.phase][request]
        self._forget_kv(request)
        self._count(request.served, -1)
        request.served.predictions.clear(request.slot, request.generation)
        request.publish_state(state)

    @staticmethod
    def _count(served: ServedTable, more: int) -> None:
        served.live += more
        served.tell("live", served.live)

    def drop_all(self, served: ServedTable) -> None:
        """Forget all requests of a table."""
        for request in [request for request in self if request.served is served]:
            self.drop(request)

    # KV memory

    def check_size(self, request: DraftRequest) -> None:
        """Give up a request whose text exceeds the draft's positions or its whole KV memory."""
        if len(request.tokens) > self._longest:
            self.drop(request, GIVEN_UP)

    def admit(self) -> None:
        """Give KV memory and a seat to requests without, as far as their text and branches fit the
        free blocks. The table with the fewest seats goes first, so that under overload no target
        takes all. An idle table gets none."""
        if not self._free_seats or len(self) == self._seats - len(self._free_seats):
            return
        waiting: defaultdict[ServedTable, deque[DraftRequest]] = defaultdict(deque)
        for request in self:
            if request.seat < 0 and not request.served.idle:
                waiting[request.served].append(request)
        seats = Counter(r.served for r in self if r.seat >= 0) if len(waiting) > 1 else Counter()
        while waiting and self._free_seats:
            served = min(waiting, key=seats.__getitem__)
            if self._seat(waiting[served].popleft()):
                seats[served] += 1
            if not waiting[served]:
                del waiting[served]

    def _seat(self, request: DraftRequest) -> bool:
        """Give a request a seat, and KV memory for its text and branches, if there is enough."""
        # Without the last token: the model's output after that token has to be computed.
        table, known = request.table, len(request.tokens) - 1
        size = len(request.tokens) + self._policy.scratch
        if self.pool.blocks_for(size) - table.shared(request.tokens, known) > self.pool.num_free:
            return False
        request.fed = table.adopt(request.tokens, known)
        if not table.reserve(size):
            self._forget_kv(request)
            return False
        request.seat = self._free_seats.pop()
        return True

    def reserve(
        self, requests: Sequence[DraftRequest], entries: Callable[[DraftRequest], int]
    ) -> list[DraftRequest]:
        """Reserve ``entries`` KV entries beyond what each request was fed; returns those that got
        them. The others lose their KV, wait for memory and are fed their text again."""
        fitting = []
        for request in requests:
            if request.table.reserve(request.fed + entries(request)):
                fitting.append(request)
            else:
                self._forget_kv(request)
                request.publish_state(PREPARING)
        return fitting

    def _forget_kv(self, request: DraftRequest) -> None:
        """Take a request's KV memory and its seat: the text has to be fed again. Work that has
        begun for the request still uses both; the next owner's work comes after it."""
        request.leave_tree()
        request.table.clear()
        request.fed, request.states, request.left_over = 0, (), None
        if request.seat >= 0:
            self._free_seats.append(request.seat)
            request.seat = -1
