"""What is tuned, how it is measured, and what comes out: `msgspec` structs, saved as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from math import prod
from typing import Any

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """One way to serve: plain vLLM, or ssd with this draft, k and f."""

    draft: str | None = None
    k: int = 0
    f: int = 0

    @property
    def name(self) -> str:
        return "plain vLLM" if self.draft is None else f"{self.draft} k={self.k} f={self.f}"

    def speculative_config(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """For --speculative-config, with the options that were ``given``; None for plain vLLM."""
        if self.draft is None:
            return None
        return {**given, "method": "ssd", "model": self.draft, "k": self.k, "f": self.f}


PLAIN = Candidate()


class Prompt(msgspec.Struct, frozen=True):
    """``messages`` of a chat, for the model's chat template, or a ``prompt`` as it is."""

    messages: list[dict[str, str]] | None = None
    prompt: str | None = None


class Load(msgspec.Struct, frozen=True):
    """clients: numbers of requests that run at once, measured one after the other. requests: of
    each client. tokens: of output, at most. temperature: None = the model's own default."""

    clients: list[int]
    requests: int
    tokens: int
    temperature: float | None = None


class Setting(msgspec.Struct, frozen=True):
    """Everything in which candidates must agree to be comparable. engine: vLLM's arguments.
    machine, versions: in words."""

    target: str
    engine: list[str]
    load: Load
    prompts: list[Prompt]
    machine: str
    versions: str

    def digest(self) -> str:
        """A short name that another setting does not have."""
        return blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


class Figures(msgspec.Struct, frozen=True):
    """With ``clients`` requests at once. A round is one request's part of an engine step. hit: the
    share of rounds whose drafts were there in time; None for plain vLLM."""

    clients: int
    tokens_per_s: float
    tokens_per_round: float
    ms_per_round: float
    hit: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """A candidate with its figures, one for each number of clients. error: its last words, if it
    failed; it then has no figures."""

    candidate: Candidate
    figures: list[Figures] = []
    error: str | None = None


def speedup(outcome: Outcome, plain: Outcome) -> float:
    """How many times the tokens a second of plain vLLM, as the geometric mean over all numbers of
    clients; 0 for a candidate that failed."""
    if outcome.error is not None:
        return 0.0
    ratios = [
        ours.tokens_per_s / theirs.tokens_per_s
        for ours, theirs in zip(outcome.figures, plain.figures, strict=True)
    ]
    return float(prod(ratios) ** (1 / len(ratios)))
