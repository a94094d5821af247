"""Sources of a round's draft tokens, as numbers that kernels and the host share.

The target accepts another share of each kind. FROM_BRANCH: the outcome was predicted.
FROM_FALLBACK: drafted once the outcome was known. LEFT_OVER: drafted for an earlier round, which
had more draft tokens than were verified. GUESSED: copied from the text (``guess_kernels.py``).
"""

FROM_BRANCH, FROM_FALLBACK, LEFT_OVER, GUESSED = range(4)
KINDS = 4
