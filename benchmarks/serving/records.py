"""What is measured, and what is saved of it: `msgspec` structs, as JSON."""

from typing import Any, Literal, get_args

import msgspec

Kind = Literal["plain", "draft_model", "ngram", "eagle3", "ssd-f0", "ssd"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OURS: tuple[Kind, ...] = ("ssd-f0", "ssd")  # those with a draft of their own


class Load(msgspec.Struct, frozen=True):
    """What clients ask of a server. concurrency: requests under way at most; None: any number.
    prompt_tokens: approximate length of each prompt; None: the data set's own. tokens: length of
    each answer. repeat: number of this repetition, from 0. turns: of the chat that each
    request is."""

    dataset: str
    requests: int
    tokens: int
    concurrency: int | None = None
    prompt_tokens: int | None = None
    temperature: float = 0.0
    repeat: int = 0
    turns: int = 1


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles in milliseconds."""

    mean: float
    p50: float
    p99: float


class Seen(msgspec.Struct, frozen=True):
    """What a client saw of one load.

    seconds: from the first request to the end of the last. tokens: output, of all answers. ttft:
    time to the first token; itl: time between two messages with tokens (speculation puts several
    tokens into one message); tpot: an answer's time after its first token, divided by the tokens
    after it; e2e: of a whole answer; gap: an answer's longest itl. texts: the answers, in the order
    of the prompts; of a chat, all its answers in one."""

    completed: int
    seconds: float
    tokens: int
    e2e: Spread
    ttft: Spread
    itl: Spread
    tpot: Spread
    gap: Spread
    texts: list[str]


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
    gpus: int
    engine: dict[str, Any]
    environment: dict[str, str]


class Run(msgspec.Struct, frozen=True):
    """One load on one side, as one client saw it."""

    client: str
    load: Load
    seen: Seen
    speculation: Speculation | None = None


class Result(msgspec.Struct):
    """A side with its runs. error: why there are no more runs, if it failed."""

    side: Side
    runs: list[Run] = []
    error: str | None = None


class Saved(msgspec.Struct, frozen=True):
    """A file of results. about: what is true of all of them, by name."""

    about: dict[str, str]
    results: list[Result]
