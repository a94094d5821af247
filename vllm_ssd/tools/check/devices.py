"""Findings about devices that were tried: their memory, the draft's attention, the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_ssd.draft.attention.registry import Backend
from vllm_ssd.tools.check.device_trial import Report, TriedBackend
from vllm_ssd.tools.check.findings import Finding, gib


@dataclass(frozen=True)
class DraftMemory:
    """Bytes that a draft needs. weights: None if unknown. kv_cache: most for the KV cache. least:
    one KV block, which the draft needs to start. of_free: share of the memory left by the weights
    that the KV cache may use."""

    weights: int | None
    kv_cache: int
    least: int
    of_free: float = 1.0


def failed_trial(device: str, words: str) -> Finding:
    """Finding about a device whose trial failed. words: the last words of the trial's process."""
    return Finding(
        "bad",
        "device",
        f"{device} cannot be used ({words})",
        "end processes that use it exclusively, or install a driver that fits this torch",
    )


def look_at_memory(device: str, report: Report, need: DraftMemory | None) -> Iterator[Finding]:
    """Findings about the memory of the draft's device. need: None if no draft is known."""
    fact = f"{gib(report.free)} of {gib(report.total)} are free on {device} ({report.device})"
    yield Finding("ok", "draft's device", fact)
    if need is None:
        return
    weights = need.weights or 0
    left = report.free - weights
    cache = min(need.kv_cache, int(need.of_free * max(left, 0)))
    named = "weights of unknown size" if need.weights is None else f"{gib(weights)} of weights"
    fact = f"{named}, a KV cache of up to {gib(need.kv_cache)}"
    if cache < need.least:
        yield Finding(
            "bad",
            "draft's memory",
            f"{fact}, and {gib(report.free)} are free",
            "end what else runs there, name a smaller draft, or another device with draft_device",
        )
    elif cache < need.kv_cache:
        yield Finding(
            "note",
            "draft's memory",
            f"{fact}, of which {gib(cache)} have room: with many long requests at once, some get "
            "no drafts",
            "lower --max-num-seqs or max_model_len in --speculative-config",
        )
    else:
        yield Finding("ok", "draft's memory", fact)


def look_at_backends(
    backends: Sequence[Backend],
    tried: Sequence[TriedBackend],
    left_out: Sequence[tuple[str, str]],
) -> Iterator[Finding]:
    """Findings about the draft's attention; ssd uses the first sound backend. tried: the first of
    ``backends``, or all. left_out: other backends, with the reason as the end of a sentence."""
    used = next((each.backend for each in tried if each.fault is None), None)
    for each in tried:
        times = f"{each.first_s:.2f} s at first, {each.again_s * 1000:.0f} ms again"
        if each.fault is None:
            chosen = ", is used" if each.backend == used else ""
            fact = f"{each.backend}: right in the self-test ({times}){chosen}"
            yield Finding("ok", "attention", fact)
        else:
            yield Finding(
                "bad" if used is None else "note",
                "attention",
                f"{each.backend} {each.fault}",
                'write "tree_backend": "sdpa"'
                if used is None
                else f"nothing to do: {used} is used instead",
            )
    for backend in backends[len(tried) :]:
        fact = f"{backend}: not tried because {used} is used; --all-backends tries it"
        yield Finding("ok", "attention", fact)
    for name, why in left_out:
        yield Finding("ok", "attention", f"{name} {why}: not used")


def look_at_reach(whose: str, device: str, report: Report, remedy: str) -> Finding:
    """Finding whether a GPU reaches the speculation table. whose: "target" or "draft". remedy: ""
    if the GPU need not reach it, because the draft does not use CUDA graphs."""
    name = f"{whose}'s table"
    if report.out_of_reach is None:
        return Finding("ok", name, f"{device} reads it in {report.look_ns} ns and can write to it")
    fact = f"{device} cannot reach it ({report.out_of_reach})"
    if remedy:
        return Finding("bad", name, fact, remedy)
    return Finding("ok", name, f"{fact}, and publishes from the CPU")
