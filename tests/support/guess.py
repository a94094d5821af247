"""What ``worker/guess_kernels.py`` is to guess, by a plain search."""

from collections.abc import Sequence

from vllm_ssd.worker.guess_kernels import LONGEST, REACH


def in_vocabulary(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens of a text, with 0 in place of those that no model can produce: a multimodal
    prompt's placeholders."""
    return [token if 0 <= token < vocab_size else 0 for token in tokens]


def continuation(text: Sequence[int], k: int, vocab_size: int) -> list[int]:
    """k tokens after a text. Of the places whose last tokens equal those of the text, the longest
    match counts, then the latest. What follows it goes on periodically beyond the end of the text;
    without a match the newest token is repeated."""
    end = len(text) - 1

    def match(place: int) -> int:
        """How many tokens up to a place equal those at the end."""
        most = min(LONGEST, place + 1)
        return next((n for n in range(most) if text[place - n] != text[end - n]), most)

    places = range(max(0, end - REACH), end)
    matched, best = max(((match(place), place) for place in places), default=(0, 0))
    follows, period = (best + 1, end - best) if matched else (end, 1)
    return in_vocabulary([text[follows + i % period] for i in range(k)], vocab_size)
