"""Sources of a round's draft tokens, as numbers that kernels and the host share.

The target accepts another share of each kind. FROM_BRANCH: the outcome was predicted.
FROM_FALLBACK: drafted once the outcome was known. FROM_SIBLING: from the branch of another bonus
token at the same accepted length, for want of anything better. LEFT_OVER: drafted for an earlier
round, which had more draft tokens than were verified. GUESSED: copied from the text
(``guess_kernels.py``).
"""

FROM_BRANCH, FROM_FALLBACK, FROM_SIBLING, LEFT_OVER, GUESSED = range(5)
KINDS = 5
