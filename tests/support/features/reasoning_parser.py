"""A reasoning parser for models without tokens for thoughts, as vLLM loads it from a file."""

from collections.abc import Sequence

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

THINK = "<issue_start>"  # some special token of SmolLM2's


@ReasoningParserManager.register_module("one-sentence")
class OneSentence(BaseThinkingReasoningParser):
    """Thoughts are one sentence, and only of requests whose prompt asks for them with ``THINK``."""

    start_token, end_token = THINK, "."

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return self.start_token_id not in input_ids or super().is_reasoning_end(input_ids)
