"""Requests that come, go and are interrupted; caches that are used and emptied."""

from collections.abc import Callable
from typing import Any

from tests.support.features.prompts import LONG, SHORT
from tests.support.features.results import completions, generate
from tests.support.harness import greedy


def joining(llm: Any) -> Any:
    """Requests of very different lengths; each time one leaves, or after some steps, others join:
    more than run at once."""
    engine = llm.llm_engine
    sizes = [(1, 36), (90, 6), (20, 12), (70, 20), (3, 1), (80, 9), (9, 24), (50, 2), (2, 16)]
    token = llm.get_tokenizer().encode(LONG)
    waiting = [
        (
            f"join-{index}",
            {"prompt_token_ids": token[index : index + prompt]},
            greedy(length, ignore_eos=True),
        )
        for index, (prompt, length) in enumerate(sizes)
    ]
    done, step = {}, 0
    while waiting or engine.has_unfinished_requests():
        if step % 4 == 0 and waiting:
            for _ in range(2 + step % 3):
                if waiting:
                    engine.add_request(*waiting.pop(0))
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        step += 1
    return {name.split("-")[1]: completions(output) for name, output in done.items()}


def to_the_longest(llm: Any) -> Any:
    """Texts that end where the engine's longest text does."""
    return generate(llm, [LONG, f"{SHORT} {LONG}"[:500]], greedy(None, ignore_eos=True))


def same_id(llm: Any) -> Any:
    """A request is aborted and another comes under its id, to which vLLM adds something random:
    without that, its engine core may abort the second as well."""
    engine = llm.llm_engine
    found = []
    for prompt in (SHORT, LONG, SHORT):
        engine.add_request("again", prompt, greedy(40))
        for _ in range(4):
            engine.step()
        engine.abort_request(["again"])
    engine.add_request("again", LONG, greedy(16))
    while engine.has_unfinished_requests():
        found += [completions(o) for o in engine.step() if o.finished]
    return found


def prefix_cache(llm: Any) -> Any:
    """The same long prompt again, another end of it, and again after the cache was emptied."""
    prompts = [LONG, f"{LONG} In short:"]
    found = []
    for empty in (True, False, True):
        reset = llm.reset_prefix_cache() if empty else None
        before = _counted(llm, "vllm:prefix_cache_hits")
        texts = [generate(llm, prompt, greedy(8)) for prompt in prompts]
        found.append([reset, _counted(llm, "vllm:prefix_cache_hits") > before + 100, texts])
    return found


def _counted(llm: Any, name: str) -> int:
    (metric,) = [m for m in llm.get_metrics() if m.name == name]
    return metric.value


def reset_while_running(llm: Any) -> Any:
    """All requests lose their KV cache in the middle, twice."""
    return _interrupted(llm, lambda: llm.reset_prefix_cache(reset_running_requests=True))


def pause(llm: Any) -> Any:
    """Generation is paused in the middle and goes on."""

    def interrupt() -> None:
        llm.sleep(level=0, mode="keep")
        llm.wake_up(tags=["scheduling"])

    return _interrupted(llm, interrupt)


def _interrupted(llm: Any, interrupt: Callable[[], Any]) -> Any:
    engine = llm.llm_engine
    for index, prompt in enumerate([SHORT, LONG, "A", "1, 2, 3, 4,", LONG[20:]]):
        engine.add_request(f"{index}", prompt, greedy(16))
    done, step = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        step += 1
        if step in (4, 8):
            interrupt()
    return {name: completions(output) for name, output in done.items()}


def sleep(llm: Any) -> Any:
    """The engine sleeps with requests in it, which end, and wakes up."""
    engine = llm.llm_engine
    engine.add_request("asleep", SHORT, greedy(200, ignore_eos=True))
    for _ in range(3):
        engine.step()
    llm.sleep(level=1)
    reasons = []
    while engine.has_unfinished_requests():
        reasons += [o.outputs[0].finish_reason for o in engine.step() if o.finished]
    llm.wake_up()
    return [reasons, generate(llm, [SHORT, LONG], greedy(16))]
