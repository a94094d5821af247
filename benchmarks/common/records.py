"""What the benchmark's processes tell each other, and what it saves: `msgspec` structs, as JSON."""

from typing import Any, Literal

import msgspec

Kind = Literal["ar", "verify", "draft_model", "sd", "ssd", "away"]
OURS: tuple[Kind, ...] = ("sd", "ssd", "away")  # those with a draft in a process of its own


_GOLDEN_RATIO = (5**0.5 - 1) / 2


class Load(msgspec.Struct, frozen=True):
    """What an engine is put under, at each batch size and temperature in turn. requests: their
    number, at least. per_place: requests for each place in the batch, at least. prompt_tokens: of
    each request, about. tokens: output tokens of a request, on average."""

    batch_sizes: list[int]
    requests: int
    tokens: int
    prompt_tokens: int
    temperatures: list[float] = msgspec.field(default_factory=lambda: [0.0])
    per_place: int = 2

    def requests_at(self, batch: int) -> int:
        """Requests at a batch size."""
        return max(self.requests, self.per_place * batch)

    def tokens_of(self, number: int) -> int:
        """Output tokens of a request: half to one and a half times `tokens`, spread evenly, the
        same in every run. Requests that end at different times, as real ones do, prefill in steps
        of their own on every side; those of plain vLLM would else do it all at once."""
        return max(1, round(self.tokens * (0.5 + number * _GOLDEN_RATIO % 1)))


class Side(msgspec.Struct, frozen=True):
    """One engine to measure. k: drafts a round, 0 for plain vLLM. gpus: of target and draft.
    engine: arguments for `vllm.LLM`. environment: of its processes, added to this one's."""

    name: str
    kind: Kind
    k: int
    gpus: int
    engine: dict[str, Any]
    environment: dict[str, str]
    load: Load


class Speculation(msgspec.Struct, frozen=True):
    """What the engine counted. acceptance: share of rounds that accepted at least 1, 2, .. k
    drafts. The others are of method ssd only: hit, miss and late are shares of rounds, wait_ms is
    a round's, glue_ms and step_ms are one of the draft's forwards."""

    acceptance: list[float]
    hit: float | None = None
    miss: float | None = None
    late: float | None = None
    wait_ms: float | None = None
    glue_ms: float | None = None
    step_ms: float | None = None


class Measurement(msgspec.Struct, frozen=True, tag=True):
    """One engine at one batch size. Everything but `texts` is of the time in which `batch`
    requests were running, the prefills of those that replaced finished ones included.

    tokens in `seconds` is the output. A round is one request's part of an engine step, except for
    the step that yields its first token. steps and step_seconds are of the engine steps in which
    every request decoded, none prefilled. texts: the output token ids of every request.
    """

    batch: int
    seconds: float
    tokens: int
    rounds: int
    round_tokens: int
    steps: int
    step_seconds: float
    speculation: Speculation | None
    texts: list[list[int]]
    temperature: float = 0.0


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A line for whoever is waiting."""

    text: str


class Up(msgspec.Struct, frozen=True, tag=True):
    """The engine has started, and is measured once its stdin ends."""


Event = Progress | Up | Measurement


class Result(msgspec.Struct):
    """A side with what was measured of it. error: its last words, if it failed."""

    side: Side
    measurements: list[Measurement] = []
    error: str | None = None
