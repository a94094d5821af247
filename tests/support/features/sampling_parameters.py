"""Requests with everything that vLLM's ``SamplingParams`` can ask for, all in one stream of
batches, so that each runs beside requests that ask for something else."""

from collections.abc import Callable
from typing import Any

from tests.support.features.prompts import PEOPLE, QUESTION, SHORT
from tests.support.features.reasoning_parser import THINK
from tests.support.harness import greedy

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [7, 77]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# xgrammar does not take this one, and vLLM falls back on guidance.
ODD_SCHEMA = {**SCHEMA, "patternProperties": {"^x-": {"type": "integer"}}}
GRAMMAR = """root ::= "select " name (", " name)? (", " name)? " from " name
name ::= "moon" | "sea" | "maps"
"""
CHOICE = ["the tide is high", "the tide is low", "it is dark"]
REGEX = r"(moon|sea|tide)( and (moon|sea|tide)){3}\."


def parameters(token: Callable[[str], int]) -> dict[str, tuple[str, Any]]:
    """name -> (prompt, sampling parameters). token: the token that is this text."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    story: dict[str, Any] = {
        "plain": greedy(20),
        "logprobs": greedy(16, logprobs=5),
        "logprobs under a penalty": greedy(16, logprobs=3, repetition_penalty=1.3),
        # Sampled, and yet only one text is possible.
        "n": SamplingParams(temperature=1.0, top_k=1, n=3, max_tokens=16),
        "stop": greedy(20, stop=[" a"], include_stop_str_in_output=True),
        "stop token": greedy(20, stop_token_ids=[token(".")]),
        "least tokens": greedy(32, stop_token_ids=[token(".")], min_tokens=12),
        "presence": greedy(20, presence_penalty=1.8),
        "frequency": greedy(20, frequency_penalty=1.5),
        "repetition": greedy(20, repetition_penalty=1.4),
        "bad words": greedy(20, bad_words=["the", "sea", "were friends"]),
        "allowed tokens": greedy(16, allowed_token_ids=list(range(260, 420))),
        "end at a repetition": greedy(
            24,
            allowed_token_ids=list(range(260, 290)),
            repetition_detection=RepetitionDetectionParams(8, 1, 2),
        ),
        **{
            name: greedy(32, structured_outputs=StructuredOutputsParams(**each))
            for name, each in (
                ("JSON", {"json": SCHEMA}),
                ("JSON by guidance", {"json": ODD_SCHEMA}),
                ("regex", {"regex": REGEX}),
                ("grammar", {"grammar": GRAMMAR}),
                ("choice", {"choice": CHOICE}),
            )
        },
    }
    return {
        **{name: (PEOPLE if "JSON" in name else SHORT, each) for name, each in story.items()},
        "JSON after thoughts": (
            f"{THINK}{SHORT}",
            greedy(64, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
        ),
        "end": (QUESTION, greedy(20)),
        "beyond the end": (QUESTION, greedy(20, ignore_eos=True)),
    }


NAMES = list(parameters(lambda text: 0))
