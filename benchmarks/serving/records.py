"""What is measured, and what is saved of it: `msgspec` structs, as JSON."""

from typing import Any, Literal

import msgspec

Kind = Literal["plain", "draft_model", "ngram", "eagle3", "ssd-f0", "ssd", "ssd-quantised"]
KINDS: tuple[Kind, ...] = (
    "plain",
    "draft_model",
    "ngram",
    "eagle3",
    "ssd-f0",
    "ssd",
    "ssd-quantised",
)
# Of the target, then of the draft.
Work = Literal["verify", "wait", "prefill", "fallback", "glue", "branch"]
OURS: tuple[Kind, ...] = ("ssd-f0", "ssd", "ssd-quantised")  # those with a draft of their own


class Load(msgspec.Struct, frozen=True):
    """What clients ask of a server. concurrency: requests under way at most; None: any number.
    rate: requests a second that arrive, as a Poisson process; None: all at once. prompt_tokens: of
    each prompt, about; None: as the data set has it. tokens: of each answer. repeat: which time it
    is measured, beginning with 0."""

    dataset: str
    requests: int
    tokens: int
    concurrency: int | None = None
    rate: float | None = None
    prompt_tokens: int | None = None
    temperature: float = 0.0
    repeat: int = 0


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles in milliseconds; None: the client does not tell."""

    mean: float
    p50: float
    p99: float | None


class Seen(msgspec.Struct, frozen=True):
    """What a client saw of one load.

    seconds: from the first request to the end of the last. tokens: output, of all answers. ttft:
    time to the first token; itl: time between two messages with tokens, of which speculation puts
    several into one; tpot: an answer's time after its first token, divided by the tokens after it;
    e2e: of a whole answer; gap: an answer's longest itl. good: requests a second that kept the
    bounds. ttfts_ms, itls_ms: every single one. None, or empty: the client does not tell.
    """

    completed: int
    seconds: float
    tokens: int
    e2e: Spread
    ttft: Spread
    itl: Spread
    tpot: Spread
    gap: Spread | None = None
    good: float | None = None
    ttfts_ms: list[float] = []
    itls_ms: list[float] = []


class Speculation(msgspec.Struct, frozen=True):
    """What the server counted during a load. tokens_per_round: 1 + accepted drafts a verification.
    hit, miss, late: shares of rounds, of method ssd only."""

    tokens_per_round: float
    hit: float | None = None
    miss: float | None = None
    late: float | None = None


class Side(msgspec.Struct, frozen=True):
    """A server to measure. gpus: of target and draft, 0 on CPUs. engine: arguments as vLLM's `LLM`
    has them. environment: of its processes, added to this one's."""

    name: str
    kind: Kind
    tp: int
    gpus: int
    engine: dict[str, Any]
    environment: dict[str, str]


class Run(msgspec.Struct, frozen=True):
    """One load on one side, as one client saw it."""

    client: str
    load: Load
    seen: Seen
    speculation: Speculation | None = None


class Moment(msgspec.Struct, frozen=True):
    """A piece of work of target or draft, from and to a time in milliseconds. ended: of a verify
    step, what its outcome was: "hit", "miss" or "late"."""

    work: Work
    begin: float
    end: float
    ended: str = ""


class Result(msgspec.Struct):
    """A side with its runs. timeline: of one more request, if it was asked for. error: why there
    are no more runs, if it failed."""

    side: Side
    runs: list[Run] = []
    timeline: list[Moment] = []
    error: str | None = None


class Saved(msgspec.Struct, frozen=True):
    """A file of results. about: what is true of all of them, by name. bounds: milliseconds that a
    good answer may take, of "ttft", "tpot" and "e2el"."""

    about: dict[str, str]
    bounds: dict[str, float]
    results: list[Result]
