"""What engines answered, so that it can be compared."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError


@dataclass(frozen=True)
class Refused:
    """What an engine said that does not have a feature."""

    kind: str
    text: str


def refusal(do: Callable[[], Any]) -> Refused | None:
    """What the engine says to this; None if it does it."""
    try:
        do()
    except (ValueError, NotImplementedError, VLLMValidationError) as error:
        return Refused(type(error).__name__, str(error))
    return None


def completions(output: Any) -> list[dict[str, Any]]:
    """What is compared of a request's output."""
    found = [
        {
            "tokens": list(each.token_ids),
            "text": each.text,
            "finish": each.finish_reason,
            "stop": each.stop_reason,
            "logprobs": _logprobs(each.logprobs),
        }
        for each in output.outputs
    ]
    found[0]["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return found


def _logprobs(positions: Any) -> Any:
    if positions is None:
        return None
    return [
        {token: entry.logprob for token, entry in (position or {}).items()}
        for position in positions
    ]


def generate(llm: Any, prompts: Any, params: Any, **options: Any) -> list[Any]:
    return [completions(o) for o in llm.generate(prompts, params, use_tqdm=False, **options)]


def difference(one: Any, other: Any, place: str = "", near: float = 1e-4) -> str | None:
    """Where two results differ first; floating-point numbers may differ by ``near``,
    relative or absolute."""
    if isinstance(one, float) and isinstance(other, float):
        same = math.isclose(one, other, rel_tol=near, abs_tol=near)
    elif isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        pairs = ((f"{place}[{index}]", *pair) for index, pair in enumerate(zip(one, other)))
        return next(filter(None, (difference(a, b, where, near) for where, a, b in pairs)), None)
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = ((f"{place}[{key!r}]", one[key], other[key]) for key in one)
        return next(filter(None, (difference(a, b, where, near) for where, a, b in pairs)), None)
    else:
        same = one == other
    return None if same else f"{place}: {one!r} and {other!r}"
