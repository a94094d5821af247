"""``"vocabulary":"intersection"``: finds the tokens that target and draft share, by their text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_ssd.config.draft_checks import OTHER_DRAFT, tokenizers_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# At 54%, 1.33 tokens a round were left of 4.30 (benchmarks/results/vocabularies.md). A round of ssd
# costs 5 to 15% more than a step without drafts.
LEAST_COVERAGE = 0.5
_SAMPLE = """
The harbour was quiet when the last ferry came in. Nobody had expected more than 40 passengers that
evening, and yet the queue reached as far as the old customs house. "It's the festival," the captain
explained. "We'll need two additional crossings tomorrow, at 8:30 and 17:45."

1. Read the file and count the words of each line.
2. If the result differs from the previous measurement, report an error.

def count_words(path: str) -> list[int]:
    with open(path, encoding="utf-8") as lines:
        return [len(line.split()) for line in lines if line.strip() != ""]
"""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Byte-level tokenizers write each byte as a character: itself if it can be printed, else one of
# those from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


def shared_tokens(target: ModelConfig, draft: ModelConfig) -> tuple[int, ...]:
    """For each token of the target, the draft's id for the same text. If the draft has no such
    token, it is ``~id`` of the draft's token in whose place it is read: the last one of the text,
    with which the draft guesses the next token best. ``ValueError`` if too little is shared."""
    tokenizers = tokenizers_of(target, draft)
    if tokenizers is None:
        raise ValueError(
            f'"vocabulary":"intersection" compares the tokenizers of the draft {draft.model!r} and '
            f"the target {target.model!r}, and one cannot be loaded: {OTHER_DRAFT}, or provide the "
            "tokenizers"
        )
    of_target, of_draft = tokenizers
    size, known = target.get_vocab_size(), draft.get_vocab_size()
    texts = _texts(of_target.get_vocab(), size)
    ids = _by_text(_texts(of_draft.get_vocab(), known))
    found = [~0] * size  # padding is read as token 0
    for text, token in _by_text(texts).items():
        if text in ids:
            found[token] = ids[text]
    others = [token for token in texts if found[token] < 0]
    as_text = [texts[token][0].decode(errors="replace") for token in others]
    pieces = of_draft(as_text, add_special_tokens=False).input_ids if others else []
    for token, some in zip(others, pieces):
        # A second token for a text is read as the first one is.
        last = some[-1] if some else 0
        found[token] = ~ids.get(texts[token][0], last if last < known else 0)
    sample = of_target.encode(_SAMPLE, add_special_tokens=False)
    coverage = sum(found[token] >= 0 for token in sample) / len(sample)
    if coverage < LEAST_COVERAGE:
        raise ValueError(
            f"the draft {draft.model!r} has {coverage:.0%} of the tokens of an ordinary text of "
            f"the target {target.model!r}, and drafts are of no use below {LEAST_COVERAGE:.0%}: "
            f"{OTHER_DRAFT}"
        )
    return tuple(found)


def _texts(vocabulary: Mapping[str, int], size: int) -> dict[int, tuple[bytes, bool]]:
    """For each id below ``size``, its text, and whether it stands for a byte only. Tokenizers mark
    a space before a word in one of two ways."""
    marks_spaces = "\u2581" in vocabulary
    byte_level = not marks_spaces and "\u0120" in vocabulary
    texts = {}
    for token, number in vocabulary.items():
        byte = _BYTE.fullmatch(token)
        if byte is not None:
            text = bytes([int(byte[1], 16)])
        elif byte_level and all(letter in _BYTE_OF for letter in token):
            text = bytes(_BYTE_OF[letter] for letter in token)
        else:
            text = (token.replace("\u2581", " ") if marks_spaces else token).encode()
        if number < size:
            texts[number] = text, byte is not None
    return texts


def _by_text(texts: Mapping[int, tuple[bytes, bool]]) -> dict[bytes, int]:
    """The id for each text. Of several, the lowest that does not stand for a byte only."""
    found: dict[bytes, int] = {}
    for number, (text, _) in sorted(texts.items(), key=lambda item: (item[1][1], item[0])):
        if "\ufffd".encode() not in text:  # which other texts become, too
            found.setdefault(text, number)
    return found
